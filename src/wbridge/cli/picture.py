"""A traffic matrix as a picture: shades in a terminal, or an SVG file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from wbridge.plan.matrix import Matrix
from wbridge.plan.sizes import size_of

SHADES = " ░▒▓█"
CELL, FONT = 16, 11
LABEL_WIDTH = 40
"""Letters of a label; what is longer loses its middle."""


def heat_map(matrix: Matrix) -> Iterator[str]:
    """Yield the lines of a terminal: a row for each writer, a cell for each receiver, the row's sum."""
    width = max((len(_short(name)) for name in matrix.rows), default=0)
    yield f"bytes by {matrix.by}: rows write, columns receive; {SHADES[-1] * 2} is {size_of(matrix.largest)}"
    yield " " * width + "  " + "".join(f"{number % 100:<2}" for number in range(len(matrix.columns)))
    for name, row in zip(matrix.rows, matrix.nbytes, strict=True):
        cells = "".join(_shade(nbytes, matrix.largest) * 2 for nbytes in row)
        yield f"{_short(name):<{width}} |{cells}| {size_of(sum(row))}"
    for number, name in enumerate(matrix.columns):
        yield f"column {number:<4} {name}: {size_of(sum(row[number] for row in matrix.nbytes))}"


def svg(matrix: Matrix, title: str) -> str:
    """Return an SVG file; each cell says its bytes when pointed at."""
    left = FONT * 0.62 * max((len(_short(name)) for name in matrix.rows), default=0) + 12
    top = FONT * 0.62 * max((len(_short(name)) for name in matrix.columns), default=0) + 40
    width = max(left + CELL * len(matrix.columns) + 12, FONT * 0.62 * len(title) + 16)
    height = top + CELL * len(matrix.rows) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
        f' font-family="monospace" font-size="{FONT}">',
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="18">{escape(title)}</text>',
    ]
    for number, name in enumerate(matrix.columns):
        x, y = left + CELL * (number + 0.7), top - 6
        lines.append(
            f'<text transform="translate({x:.0f} {y:.0f}) rotate(-90)">{escape(_short(name))}</text>'
        )
    for number, name in enumerate(matrix.rows):
        y = top + CELL * (number + 0.75)
        lines.append(f'<text x="{left - 6:.0f}" y="{y:.0f}" text-anchor="end">{escape(_short(name))}</text>')
        lines += _cells(matrix, number, left, top)
    return "\n".join([*lines, "</svg>", ""])


def _cells(matrix: Matrix, row: int, left: float, top: float) -> Iterator[str]:
    for column, nbytes in enumerate(matrix.nbytes[row]):
        x, y = left + CELL * column, top + CELL * row
        label = escape(f"{matrix.rows[row]} -> {matrix.columns[column]}: {size_of(nbytes)}")
        yield (
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{CELL}" height="{CELL}" stroke="#ddd"'
            f' fill="{_colour(nbytes, matrix.largest)}"><title>{label}</title></rect>'
        )


def _shade(nbytes: int, largest: int) -> str:
    """The lightest visible shade is for any byte at all."""
    return SHADES[-(-nbytes * (len(SHADES) - 1) // largest)] if nbytes else SHADES[0]


def _colour(nbytes: int, largest: int) -> str:
    """From white, for nothing, over light to dark blue."""
    if not nbytes:
        return "#ffffff"
    part = nbytes / largest
    return "#" + "".join(f"{round(light + part * (dark - light)):02x}" for light, dark in _RANGE)


_RANGE: Sequence[tuple[int, int]] = ((0xDE, 0x08), (0xEB, 0x30), (0xF7, 0x6B))


def _short(name: str) -> str:
    if len(name) <= LABEL_WIDTH:
        return name
    half = LABEL_WIDTH // 2
    return f"{name[: half - 1]}..{name[-half + 1 :]}"
