"""`python -m wbridge`: the command `wbridge`, in an environment whose scripts are not on the path."""

from __future__ import annotations

import sys

from wbridge.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
