"""A bar chart of the systems by case, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from benchmarks.systems.catalogue import PLAIN
from benchmarks.systems.results import COMPARED, Row

WIDTH, LABEL_WIDTH, VALUE_WIDTH = 760, 160, 70
BAR_HEIGHT, BAR_PITCH, TITLE_HEIGHT, PADDING = 14, 20, 40, 16
COLOURS = {"ours": "#1f6feb", "rival": "#8b949e", "plain": "#2da44e"}
TITLES = {
    "w1": "one trainer to one rollout, 1.2 GB",
    "w1-slots": "the same through slots",
    "w1-tcp": "the same over TCP",
    "w2rep": "two trainers to two replicas, 2.4 GB",
    "w2tp": "two trainers to two tensor-parallel workers, 1.2 GB",
    "w3": "20,000 tensors of 8 to 64 KiB",
    "tiny": "one tensor of 4 KiB",
    "idle": "a process that waits",
}
MEASURES = {
    "ratio_to_memcpy": "time as a multiple of one memcpy",
    "ratio_to_raw_socket": "time as a multiple of one raw socket stream",
    "latency_us_p50": "median latency in us",
    "idle_cpu_pct": "CPU in %",
}


def chart_of(rows: Sequence[Row]) -> str:
    """One panel per case, with bars on a logarithmic scale; shorter is better."""
    panels, top = [], PADDING
    for case in dict.fromkeys(str(row["case"]) for row in rows):
        metric = COMPARED.get(case, "ratio_to_memcpy")
        values = {
            str(row["system"]): float(row["value"])
            for row in rows
            if (row["case"], row["metric"]) == (case, metric) and isinstance(row["value"], int | float)
        }
        if values:
            panels.append(_panel(f"{case}: {TITLES[case]}; {MEASURES[metric]}", values, top))
            top += TITLE_HEIGHT + BAR_PITCH * len(values) + PADDING
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{top}" fill="white"/>', *panels, "</svg>", ""])


def _panel(title: str, values: dict[str, float], top: int) -> str:
    low, high = min(values.values()), max(values.values())
    floor = math.log10(max(min(low, 1.0), 1e-3) / 2)
    span = max(math.log10(max(high, 1.0)) - floor, 1e-9)
    room = WIDTH - LABEL_WIDTH - VALUE_WIDTH - 2 * PADDING
    parts = [_text(PADDING, top + TITLE_HEIGHT // 2, title, size=13, weight="bold")]
    for place, (system, value) in enumerate(sorted(values.items(), key=lambda item: item[1])):
        y = top + TITLE_HEIGHT + BAR_PITCH * place
        length = max(1.0, room * (math.log10(max(value, 1e-3)) - floor) / span)
        kind = "plain" if system in PLAIN else "ours" if system.startswith("wbridge") else "rival"
        parts.append(_text(PADDING, y + BAR_HEIGHT - 3, system, size=12))
        parts.append(
            f'<rect x="{PADDING + LABEL_WIDTH}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" '
            f'fill="{COLOURS[kind]}"/>'
        )
        parts.append(_text(PADDING + LABEL_WIDTH + length + 6, y + BAR_HEIGHT - 3, f"{value:.3g}", size=12))
    return "\n".join(parts)


def _text(x: float, y: float, words: str, *, size: int, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" font-weight="{weight}">{escape(words)}</text>'
