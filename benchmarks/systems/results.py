"""From cells to rows: medians over the updates that count, and ratios between systems of one run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.systems.catalogue import OURS, OURS_SLOTS, PLAIN, RAW_SOCKET

Row = dict[str, object]
UNITS = {
    "idle_wakeups_per_heartbeat": "ratio",
    "ratio_to_memcpy": "ratio", "ratio_to_raw_socket": "ratio", "ratio_to_raw_socket_and_copies": "ratio",
    "latency_over_notify": "ratio", "cpu_to_memcpy": "ratio", "gb_per_s": "GB/s", "memcpy_gb_per_s": "GB/s",
    "latency_us_p50": "us", "notify_us_p50": "us", "wall_ms": "ms", "push_ms": "ms", "cpu_ms": "ms",
    "connect_s": "s", "launch_s": "s", "peak_rss_mb": "MB", "idle_cpu_pct": "%", "idle_trainer_cpu_pct": "%",
}  # fmt: skip
TARGETS = {
    ("w1", OURS, "ratio_to_memcpy"): 0.9,
    ("w1-slots", OURS, "ratio_to_memcpy"): 1.4,
    ("w1-tcp", OURS, "ratio_to_raw_socket"): 1.2,
    ("w1-tcp", OURS_SLOTS, "ratio_to_raw_socket_and_copies"): 1.2,
    ("w2rep", OURS, "ratio_to_memcpy"): 1.0,
    ("w2tp", OURS, "ratio_to_memcpy"): 1.0,
    ("w3", OURS, "ratio_to_memcpy"): 1.3,
    ("w3", OURS, "python_calls_per_group_over_w1"): 2.0,
    ("tiny", OURS, "latency_over_notify"): 5.0,
    ("idle", OURS, "idle_cpu_pct"): 0.1,
    ("idle", OURS, "idle_wakeups_per_heartbeat"): 1.0,
}
COMPARED = {"w1-tcp": "ratio_to_raw_socket", "tiny": "latency_us_p50", "idle": "idle_cpu_pct"}


@dataclass
class Result:
    """All cells of one system on one case."""

    case: str
    system: str
    cells: list[dict[str, Any]] = field(default_factory=list)
    calls: dict[str, Any] | None = None
    why_not: str = ""
    """Why it could not be measured, or not to its end."""

    @property
    def updates(self) -> list[dict[str, float]]:
        return [update for cell in self.cells for update in cell.get("updates", ())]

    def median(self, key: str) -> float:
        return statistics.median(update[key] for update in self.updates)

    def of_cells(self, key: str) -> float:
        return float(statistics.median(cell[key] for cell in self.cells))

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        if self.cells:
            found = {key: self.of_cells(key) for key in ("connect_s", "launch_s")}
        if self.cells and self.case == "idle":
            found |= {key: value for key, value in self.cells[0].items() if key.startswith("idle_")}
            if num_heartbeats := self.cells[0].get("num_heartbeats"):
                found["idle_wakeups_per_heartbeat"] = found["idle_wakeups"] / num_heartbeats
            return found
        if self.updates:
            found |= self._of_updates()
        if self.calls and self.calls["num_groups"]:
            found["python_calls_per_group"] = self.calls["num_calls"] / self.calls["num_groups"]
            found["num_groups"] = self.calls["num_groups"]
        return found

    def _of_updates(self) -> dict[str, float]:
        found = {key: max(cell[key] for cell in self.cells) for key in ("peak_rss_mb", "load1")}
        found["num_updates"] = len(self.updates)
        found["cpu_ms"], found["push_ms"] = 1e3 * self.median("cpu_s"), 1e3 * self.median("push_s")
        if self.case == "tiny":
            found["latency_us_p50"] = 1e6 * self.median("wall_s")
            if notify_s := self.cells[0].get("notify_s"):
                notify_s = self.of_cells("notify_s")
                found["notify_us_p50"] = 1e6 * notify_s
                found["latency_over_notify"] = self.median("wall_s") / notify_s
            return found
        nbytes = self.cells[0]["nbytes"]
        bare_s = [update["memcpy_s_per_byte"] * nbytes for update in self.updates]
        ratios = {
            name: statistics.median(u[key] / s for u, s in zip(self.updates, bare_s, strict=True))
            for name, key in (("ratio_to_memcpy", "wall_s"), ("cpu_to_memcpy", "cpu_s"))
        }
        found["wall_ms"] = 1e3 * self.median("wall_s")
        found["gb_per_s"] = nbytes / self.median("wall_s") / 1e9
        found["memcpy_gb_per_s"] = nbytes / statistics.median(bare_s) / 1e9
        found["num_discarded"] = sum(cell["num_discarded"] for cell in self.cells)
        return ratios | found


def rows_of(results: list[Result]) -> list[Row]:
    """All metrics of all systems; what could not be measured is a row too, with its reason."""
    rows: list[Row] = []
    for result in results:
        metrics = result.metrics() | _between(result, results)
        rows += [_row(result, metric, round(value, 4)) for metric, value in metrics.items()]
        if result.why_not or not metrics:
            why_not = result.why_not or "no update counts: the machine was too busy for two equal memcpys"
            rows.append({**_row(result, "unavailable", None), "reason": why_not})
    return rows


def verdicts(rows: list[Row]) -> list[str]:
    """Say of each target, and of each comparison with the rivals, whether it is met."""
    found = {(row["case"], row["system"], row["metric"]): row["value"] for row in rows}
    said = []
    for (case, system, metric), target in TARGETS.items():
        value = found.get((case, system, metric))
        if isinstance(value, float):
            said.append(
                f"{case:9} {metric:32} {value:9.3f}  <= {target}: {'met' if value <= target else 'MISSED'}"
            )
    for case in dict.fromkeys(str(row["case"]) for row in rows):
        metric = COMPARED.get(case, "ratio_to_memcpy")
        values = {
            str(s): v for (c, s, m), v in found.items() if (c, m) == (case, metric) and isinstance(v, float)
        }
        ours = values.pop(OURS, None)
        rivals = {s: v for s, v in values.items() if s not in (*PLAIN, OURS_SLOTS)}
        if ours is not None and rivals:
            best = min(rivals, key=lambda name: rivals[name])
            is_ahead = ours < rivals[best]
            said.append(
                f"{case:9} {metric:32} {ours:9.3f}  best rival {best} {rivals[best]:.3f}: "
                f"{'ahead' if is_ahead else 'BEHIND'}"
            )
    return said


def _between(result: Result, results: Iterable[Result]) -> dict[str, float]:
    """Ratios to another system, or another case, of the same run."""
    found: dict[str, float] = {}
    others = {(other.case, other.system): other for other in results}
    raw = others.get((result.case, RAW_SOCKET))
    if raw and raw.updates and result.updates:
        wall_s, raw_s = result.median("wall_s"), raw.median("wall_s")
        found["ratio_to_raw_socket"] = wall_s / raw_s
        if "gather_s" in result.cells[0]:
            copies_s = result.of_cells("gather_s") + result.of_cells("scatter_s")
            found["ratio_to_raw_socket_and_copies"] = wall_s / (raw_s + copies_s)
    first = others.get(("w1", result.system))
    if result.case == "w3" and result.calls and first and first.calls and first.calls["num_groups"]:
        per_group = result.metrics()["python_calls_per_group"] / first.metrics()["python_calls_per_group"]
        found["python_calls_per_group_over_w1"] = per_group
    return found


def _row(result: Result, metric: str, value: float | None) -> Row:
    case, system = result.case, result.system
    unit = UNITS.get(metric, "count")
    return {
        "benchmark": "peers",
        "case": case,
        "system": system,
        "metric": metric,
        "value": value,
        "unit": unit,
    }
