"""From results to rows, each with whether it is valid; and what is promised of them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.lab.measure import Result

OURS, DIRECT, GLOO, FETCH = "wbridge", "wbridge-direct", "gloo-broadcast", "independent-fetch"
"""`DIRECT`: this package without relays."""
SYSTEMS = (OURS, DIRECT, GLOO, FETCH)
MAX_LAB_USAGE = 0.6
PROMISED = {
    "egress_copies": (0.0, 1.02),
    "ingress_over_need_max": (0.0, 1.02),
    "time_over_bound": (0.0, 1.2),
    "sim_over_lab": (0.85, 1.15),
}
"""At least and at most."""
UNITS = {
    "egress_copies": "copies",
    "rollout_egress_copies": "copies",
    "wall_s": "s",
    "bound_s": "s",
    "sim_s": "s",
    "lab_cpu_pct": "%",
    "machine_cpu_pct": "%",
}

Row = dict[str, object]


def rows_of(results: Sequence[Result], mbit: float) -> list[Row]:
    """All metrics of the systems on one fleet; what could not be measured is a row too, with its reason."""
    rows: list[Row] = []
    measured = {result.system.name: result for result in results if result.updates}
    for result in results:
        if not result.updates:
            rows.append({**_row(result, "unavailable", None), "valid": False, "reason": result.why_not})
            continue
        metrics = _metrics(result, mbit)
        for metric, rival in (("ratio_to_gloo", GLOO), ("ratio_to_fetch", FETCH)):
            if result.system.name not in (GLOO, FETCH) and rival in measured:
                metrics[metric] = result.wall_s / measured[rival].wall_s
        if result.predicted_s is not None:
            metrics |= {"sim_s": result.predicted_s, "sim_over_lab": result.predicted_s / result.wall_s}
        reason = "" if result.lab_usage < MAX_LAB_USAGE else _too_busy(result)
        for metric, value in metrics.items():
            row: Row = {**_row(result, metric, round(value, 4)), "valid": not reason}
            rows.append({**row, "reason": reason} if reason else row)
    return rows


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Say of each promise whether it is kept."""
    found = []
    for row in rows:
        limits, value = PROMISED.get(str(row["metric"])), row["value"]
        if row["system"] != OURS or limits is None or not isinstance(value, float):
            continue
        least, most = limits
        said = ("met" if least <= value <= most else "MISSED") if row["valid"] else "INVALID"
        limit = f"{least} to {most}" if least else f"<= {most}"
        found.append(f"{row['case']:10} {row['system']:14} {row['metric']:24} {value:8.3f}  {limit}: {said}")
    return found


def _metrics(result: Result, mbit: float) -> dict[str, float]:
    bound_s = result.fleet.bound_s(mbit)
    return {
        "egress_copies": result.egress_copies,
        "ingress_over_need_max": result.ingress_over_need_max,
        "rollout_egress_copies": result.rollout_egress_copies,
        "time_over_bound": result.wall_s / bound_s,
        "wall_s": result.wall_s,
        "bound_s": bound_s,
        "lab_cpu_pct": 100 * result.lab_usage,
        "machine_cpu_pct": 100 * result.machine_usage,
    }


def _too_busy(result: Result) -> str:
    return f"the lab used {100 * result.lab_usage:.0f} % of the cores: choose a lower rate with --mbit"


def _row(result: Result, metric: str, value: float | None) -> Row:
    case = f"hosts-{result.fleet.num_rollout_hosts}"
    if result.fleet.engines_per_host > 1:
        case += f"-replicas-{result.fleet.engines_per_host}"
    return {
        "benchmark": "lab",
        "case": case,
        "system": result.system.name,
        "metric": metric,
        "value": value,
        "unit": UNITS.get(metric, "ratio"),
    }
