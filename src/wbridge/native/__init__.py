"""Optional packages and compiled parts: loaded when asked for, with a remedy when absent."""

from __future__ import annotations

import importlib
from types import ModuleType

from wbridge.errors import NativeUnavailable


def require(module: str) -> ModuleType:
    """Import `module`, a part of the `cu12` or `cu13` extra such as `ucxx` or `cuda.core`.

    Raises:
        NativeUnavailable: it is not installed, or is but cannot be loaded here.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        raise NativeUnavailable(
            f"{module} is not installed (no module named {exc.name!r}); "
            f"install the extra for your CUDA major, `pip install -e '.[cu12]'` or `'.[cu13]'`, not both"
        ) from exc
    except ImportError as exc:
        raise NativeUnavailable(
            f"{module} is installed but does not load: {exc}; "
            f"reinstall the extra, and only one of cu12 and cu13"
        ) from exc
