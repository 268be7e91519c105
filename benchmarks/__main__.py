"""Runs one benchmark by name: `python -m benchmarks NAME [--json PATH] [its own arguments]`."""

from __future__ import annotations

import pkgutil
import runpy
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Run the benchmark that is the first argument, as a script with the rest; return the exit code."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    names.remove("__main__")
    if not arguments or arguments[0] not in names:
        print(
            f"usage: python -m benchmarks NAME [--json PATH]\nbenchmarks: {', '.join(names)}", file=sys.stderr
        )
        return 2
    sys.argv = [f"benchmarks.{arguments[0]}", *arguments[1:]]
    runpy.run_module(f"benchmarks.{arguments[0]}", run_name="__main__", alter_sys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
