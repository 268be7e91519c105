"""The published PyPI package `wbridge` (another project) on a CPU: its own figures for the same questions.

Its scripts run in a virtual environment of their own, since the package has the same name as this one. They
use a toy model of 20 MB; an idle tick is wall time, and AGST takes the slower trainer for both.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGES = ("torch==2.13.0", "wbridge==0.1.0", "numpy")
STAGINGS = {"sync": (0, 0), "sender_overlap": (1, 0), "receiver_overlap": (0, 1), "async": (1, 1)}
"""Sender and receiver staging of each mode."""
TRAINERS, ENGINES, TENSOR_PARALLEL = 2, 2, 2
UPDATES = 6
RUN_TIMEOUT_S = 300

Found = dict[str, dict[str, float]]


def measure_reference(scripts: Path, nap_s: float, cases: list[str]) -> Found:
    """Return metrics by case. What cannot run here is said on the terminal and left out."""
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=True)
        python = f"{directory}/bin/python"
        install = [python, "-m", "pip", "install", "-q", *PACKAGES]
        if subprocess.run(install, check=False).returncode:
            print(f"reference: {' and '.join(PACKAGES)} cannot be installed here")
            return {}
        return _idle(python, scripts) | {
            mode: found
            for mode in STAGINGS
            if mode in cases and (found := _mode(python, scripts, mode, nap_s))
        }


def _idle(python: str, scripts: Path) -> Found:
    printed = _run([python, str(scripts / "lockstep_bench.py")])
    ticks = re.findall(r"ranks=(\d+) tick median=(\d+)us", printed)
    return {f"tp{ranks}": {"idle_poll_us_p50": float(median)} for ranks, median in ticks}


def _mode(python: str, scripts: Path, mode: str, nap_s: float) -> dict[str, float]:
    awake = _updates(python, scripts, mode, 0.0)
    if awake is None:
        return {}
    found = {"ewtt_ms": _median(awake["ewtt_ms"]), "agst_ms": _agst_ms(awake)}
    if mode == "async" and (beside := _updates(python, scripts, mode, nap_s)) is not None:
        polls = [_neighbour_poll_ms(run) for run in (awake, beside)]
        sends = [run["send_block_ms"][2] for run in (awake, beside)]
        found |= {"neighbour_poll_extra_ms": polls[1] - polls[0], "third_send_extra_ms": sends[1] - sends[0]}
    return found


def _updates(python: str, scripts: Path, mode: str, nap_s: float) -> dict[str, Any] | None:
    """Run some updates in which the second engine sleeps for `nap_s` after each; None if that fails."""
    sender, receiver = STAGINGS[mode]
    options = {"trainers": TRAINERS, "engines": ENGINES, "tp": TENSOR_PARALLEL, "updates": UPDATES}
    options |= {"ss": sender, "rs": receiver, "slow-from": 1}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    printed = _run([python, "-O", str(scripts / "e2e_cpu.py"), *arguments, "--slow-recv", str(nap_s)])
    results = [json.loads(line) for line in printed.splitlines() if line.startswith('{"args"')]
    return results[-1] if results and results[-1]["ok"] else None


def _agst_ms(run: dict[str, Any]) -> float:
    polls = [stalls for _, stalls in run["recv_block_by_rank"]]
    num_workers = TRAINERS + len(polls)
    versions = zip(run["send_block_ms"], *polls, strict=True)
    return _median((TRAINERS * send + sum(stalls)) / num_workers for send, *stalls in versions)


def _neighbour_poll_ms(run: dict[str, Any]) -> float:
    """Of the first engine."""
    stalls = [
        stall for name, stalls in run["recv_block_by_rank"] if name.startswith("(0,") for stall in stalls
    ]
    return _median(stalls)


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def _run(command: list[str]) -> str:
    """Return what a script printed; say on the terminal how it failed."""
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": tempfile.gettempdir()}
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, env=environment
        )
    except subprocess.CalledProcessError as exc:
        print(f"reference: {' '.join(command[1:])} failed: {(exc.stderr + exc.stdout)[-600:]}")
        return ""
    except subprocess.TimeoutExpired:
        print(f"reference: {' '.join(command[1:])} took more than {RUN_TIMEOUT_S} s")
        return ""
    return done.stdout
