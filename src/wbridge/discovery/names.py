"""Parameter names without the prefixes that wrappers add, so that trainer and checkpoint agree."""

from __future__ import annotations

from collections.abc import Iterable

from wbridge.errors import LayoutError

ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")
"""Path components that a wrapper inserts at any depth."""

LEADING = ("module", "base_model.model")
"""Components that a wrapper puts in front of the whole path only."""


def normalize_name(name: str, *, anywhere: Iterable[str] = ANYWHERE, leading: Iterable[str] = LEADING) -> str:
    """Return `name` without wrapper components, however often and in whatever order they are nested."""
    dropped, fronts = frozenset(anywhere), tuple(leading)
    name = ".".join(part for part in name.split(".") if part not in dropped)
    while front := next((f for f in fronts if name.startswith(f + ".")), None):
        name = name[len(front) + 1 :]
    return name


def normalize_names(
    names: Iterable[str], *, anywhere: Iterable[str] = ANYWHERE, leading: Iterable[str] = LEADING
) -> dict[str, str]:
    """Map each name to its normal form.

    Raises:
        LayoutError: two names have the same normal form; the message gives both.
    """
    anywhere, leading = tuple(anywhere), tuple(leading)
    result: dict[str, str] = {}
    original: dict[str, str] = {}
    for name in names:
        normal = normalize_name(name, anywhere=anywhere, leading=leading)
        first = original.setdefault(normal, name)
        if first != name:
            raise LayoutError(
                f"parameters {first!r} and {name!r} are both {normal!r} without wrapper prefixes; "
                "rename one, or pass the prefixes to strip"
            )
        result[name] = normal
    return result
