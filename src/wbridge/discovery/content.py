"""What a storage holds: which checkpoint elements lie where, after the writes so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from wbridge.layout.algebra import intersect, subtract
from wbridge.layout.region import Region, Strided


class FromCheckpoint(msgspec.Struct, frozen=True):
    """Elements of one checkpoint tensor, as they are or cast to these dtypes one after another."""

    tensor: str
    casts: tuple[str, ...] = ()


class Computed(msgspec.Struct, frozen=True):
    """The result of arithmetic on these checkpoint tensors; `operation` names it and where it ran."""

    operation: str
    tensors: tuple[str, ...]


class Constant(msgspec.Struct, frozen=True):
    """Values that do not depend on the checkpoint, such as the zeros of a padding."""


Origin = FromCheckpoint | Computed | Constant
CONSTANT = Constant()


class Piece(msgspec.Struct, frozen=True):
    """Where the elements of `region.target` in a storage come from.

    `region.source` counts elements of the checkpoint tensor; it is all zeros for other origins.
    """

    origin: Origin
    region: Region

    @property
    def tensors(self) -> tuple[str, ...]:
        if isinstance(self.origin, FromCheckpoint):
            return (self.origin.tensor,)
        return self.origin.tensors if isinstance(self.origin, Computed) else ()


class View(msgspec.Struct, frozen=True):
    """A strided view of a storage, in elements."""

    extents: tuple[int, ...]
    place: Strided


class Content:
    """The pieces of one storage. Later writes replace earlier ones, element by element."""

    def __init__(self, *, whole: FromCheckpoint | None = None, num_elements: int = 0) -> None:
        """`whole`: the storage is that checkpoint tensor, row-major, until something is written to it."""
        self._whole = whole
        self._num_elements = num_elements
        self._log: list[Piece] = []
        self._num_settled = 0

    def write(self, pieces: Iterable[Piece]) -> None:
        if self._whole is not None:
            flat = Strided(0, (1,))
            self._log = [Piece(self._whole, Region((self._num_elements,), flat, flat))]
            self._num_settled, self._whole = 1, None
        self._log.extend(pieces)

    def pieces(self) -> list[Piece]:
        """Return what is there now; no element is in two pieces."""
        if self._num_settled < len(self._log):
            self._log = _settle(self._log)
            self._num_settled = len(self._log)
        return self._log

    def tensors(self) -> tuple[str, ...]:
        """Return the checkpoint tensors that have a part in this storage."""
        if self._whole is not None:
            return (self._whole.tensor,)
        return tuple(dict.fromkeys(t for piece in self.pieces() for t in piece.tensors))

    def read(self, view: View, target: Strided) -> Iterator[Piece]:
        """Yield what `view` holds, placed at `target` with the same extents; later pieces replace earlier."""
        if self._whole is not None:
            yield Piece(self._whole, Region(view.extents, view.place, target))
            return
        yield of_origin(CONSTANT, view.extents, target)
        yield from self.written(view, target)

    def written(self, view: View, target: Strided) -> Iterator[Piece]:
        """Yield the pieces inside `view` only, placed at `target`: nothing for what was never written."""
        wanted = Region(view.extents, view.place, target)
        low, high = bounds(view.extents, view.place)
        for piece in self.pieces():
            first, last = bounds(piece.region.extents, piece.region.target)
            if first > high or last < low:
                continue
            held = Region(piece.region.extents, piece.region.target, piece.region.source)
            for o in intersect(held, wanted):
                yield Piece(piece.origin, Region(o.extents, o.left, o.right))


def of_origin(origin: Origin, extents: tuple[int, ...], target: Strided) -> Piece:
    return Piece(origin, Region(extents, Strided(0, (0,) * len(extents)), target))


def bounds(extents: tuple[int, ...], place: Strided) -> tuple[int, int]:
    """Return the smallest and the largest offset of a strided set."""
    low = high = place.offset
    for n, s in zip(extents, place.strides, strict=True):
        if s > 0:
            high += (n - 1) * s
        else:
            low += (n - 1) * s
    return low, high


def _settle(log: list[Piece]) -> list[Piece]:
    """Let the last writer win: cut from each piece what later ones overwrite."""
    spans = [bounds(piece.region.extents, piece.region.target) for piece in log]
    order = sorted(range(len(log)), key=lambda i: spans[i][0])
    later: dict[int, list[int]] = {}
    open_pieces: list[int] = []
    for i in order:
        open_pieces = [j for j in open_pieces if spans[j][1] >= spans[i][0]]
        for j in open_pieces:
            later.setdefault(min(i, j), []).append(max(i, j))
        open_pieces.append(i)
    settled = []
    for i, piece in enumerate(log):
        if i not in later:
            settled.append(piece)
        elif not any(log[j].region.target == piece.region.target and _same(log[j], piece) for j in later[i]):
            rest = subtract(piece.region, [log[j].region for j in later[i]], "target")
            settled += [Piece(piece.origin, region) for region in rest]
    return settled


def _same(a: Piece, b: Piece) -> bool:
    return a.region.extents == b.region.extents
