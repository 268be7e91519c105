"""Run one system on one case, in the interpreter of its environment; print what was measured as JSON.

    python -m benchmarks.systems.cell --system MODULE --case CASE --updates N [--option NAME=VALUE ...]

An update takes from the first trainer that enters `push`, its weights ready, to the last rollout that leaves
`pull`, the weights in its parameters. Rollouts wait already, but where they have to be given a token of what
was put. Filling and comparing lie outside. The bare memcpy runs in the first trainer right before and
right after each update; where the two differ by more than a fifth, the update does not count.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.systems.launch import END_WITH_PARENT, Launcher, Processes, WorkerFailed
from benchmarks.systems.worker import IDLE_S, LIBC, Timing
from benchmarks.systems.workloads import Workload, workload_of

WITHOUT_MEMCPY = ("tiny", "idle")
SETTLE_S = {"tiny": 0.005}
DEFAULT_SETTLE_S = 0.02
IDLE_SETTLE_S = 8.0
"""Longer than a heartbeat: what was set up before the wait has fired by then."""
MAX_DIFFERENCE = 0.2
NUM_TRIES = 3
"""At most so many updates for each that counts."""

Cell = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True)
    parser.add_argument("--case", required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--keep-noisy", action="store_true")
    parser.add_argument("--part", type=float, default=1.0)
    arguments = parser.parse_args()
    LIBC.prctl(END_WITH_PARENT, signal.SIGKILL)
    options = dict(option.split("=", 1) for option in arguments.option)
    try:
        workload = workload_of(arguments.case, arguments.part)
        found = measure(
            arguments.system, arguments.case, workload, arguments.updates, options, arguments.keep_noisy
        )
    except WorkerFailed as exc:
        found = {"error": str(exc).strip()}
    print(json.dumps(found), flush=True)
    os._exit(0)  # some systems leave threads that never end


def measure(
    system: str,
    case: str,
    workload: Workload,
    num_updates: int,
    options: dict[str, str],
    keep_noisy: bool,
) -> Cell:
    module = importlib.import_module(f"benchmarks.systems.{system}")
    begin_s = time.monotonic()
    launcher = getattr(module, "Launcher", Processes)(system, workload, options)
    launch_s = time.monotonic() - begin_s
    run = Run(
        launcher,
        workload,
        takes_tokens=getattr(module, "TAKES_TOKENS", False),
        has_memcpy=case not in WITHOUT_MEMCPY,
        settle_s=SETTLE_S.get(case, DEFAULT_SETTLE_S),
    )
    try:
        begin_s = time.monotonic()
        reused_s = max(run.everywhere("setup"))
        found: Cell = {"launch_s": launch_s, "connect_s": time.monotonic() - begin_s + reused_s}
        run.update(1)  # warms up
        run.everywhere("forget_peak")
        if case == "idle":
            return found | run.idle(2) | run.extras(0)
        if options.get("count_calls"):
            return found | run.count_calls(2)
        found |= run.updates(2, num_updates, keep_noisy)
        found["peak_rss_mb"] = max(run.everywhere("peak_mb"))
        found["load1"] = os.getloadavg()[0]
        found |= run.extras(num_updates)
        run.close()
    finally:
        launcher.stop()
    return found


class Run:
    """A launched system: its updates, one after the other."""

    def __init__(
        self,
        launcher: Launcher,
        workload: Workload,
        *,
        takes_tokens: bool = False,
        has_memcpy: bool = False,
        settle_s: float = DEFAULT_SETTLE_S,
    ) -> None:
        self._launcher, self._takes_tokens = launcher, takes_tokens
        self._has_memcpy, self._settle_s = has_memcpy, settle_s
        self.nbytes = workload.nbytes
        self._trainers = range(workload.job.num_trainers)
        self._rollouts = range(len(self._trainers), len(self._trainers) + workload.job.num_rollouts)
        self._all = range(self._rollouts.stop)
        self._filled: int | None = None

    def everywhere(self, method: str, *arguments: Any) -> list[Any]:
        return self._launcher.call(self._all, method, *arguments)()

    def extras(self, times: int) -> dict[str, float]:
        """Figures of the system's own, summed over the workers."""
        found: dict[str, float] = {}
        for extras in self.everywhere("extras", times):
            found |= {name: found.get(name, 0.0) + value for name, value in extras.items()}
        return found

    def updates(self, version: int, num_updates: int, keep_noisy: bool) -> Cell:
        """Update until so many count."""
        kept: list[dict[str, float]] = []
        num_discarded = 0
        while len(kept) < num_updates and len(kept) + num_discarded < NUM_TRIES * num_updates:
            update = self.update(version)
            version += 1
            if update["difference"] <= MAX_DIFFERENCE or keep_noisy:
                kept.append(update)
            else:
                num_discarded += 1
        return {"nbytes": self.nbytes, "updates": kept, "num_discarded": num_discarded}

    def update(
        self,
        version: int,
        *,
        before_push: Callable[[], None] | None = None,
        after_pull: Callable[[], None] | None = None,
    ) -> dict[str, float]:
        """One update; while the rollouts compare it, the trainers take up the next version."""
        if self._filled != version:
            self._launcher.call(self._trainers, "fill", version)()
        before_s = self._memcpy()
        if self._takes_tokens:
            pushed = self._pushed(version)
            pulled = self._pull(version, [timing.result for timing in pushed])()
        else:
            waiting = self._pull(version)
            time.sleep(self._settle_s)
            if before_push:
                before_push()
            pushed, pulled = self._pushed(version), waiting()
        if after_pull:
            after_pull()
        after_s = self._memcpy()
        filling = self._launcher.call(self._trainers, "fill", version + 1)
        wrong = [name for names in self._launcher.call(self._rollouts, "wrong", version)() for name in names]
        filling()
        self._filled = version + 1
        if wrong:
            raise WorkerFailed(
                f"version {version} is not in place: {len(wrong)} parameters, first {wrong[0]}"
            )
        return {
            "wall_s": max(t.end_s for t in pulled) - min(t.begin_s for t in pushed),
            "push_s": max(t.end_s - t.begin_s for t in pushed),
            "cpu_s": sum(t.cpu_s for t in [*pushed, *pulled]),
            "memcpy_s_per_byte": (before_s + after_s) / 2,
            "difference": abs(before_s - after_s) / (min(before_s, after_s) or 1.0),
        }

    def idle(self, version: int) -> Cell:
        """CPU time and wake-ups of processes that wait for a version for `IDLE_S`."""
        pids = self.everywhere("pid")
        found: list[tuple[float, int]] = []

        def watch() -> None:
            time.sleep(IDLE_SETTLE_S)
            before = [usage(pid) for pid in pids]
            time.sleep(IDLE_S)
            after = [usage(pid) for pid in pids]
            found.extend((a[0] - b[0], a[1] - b[1]) for a, b in zip(after, before, strict=True))

        if self._takes_tokens:
            watch()  # nothing waits for a version there
        self.update(version, before_push=watch)
        waiting = [found[index] for index in self._rollouts]
        return {
            "idle_cpu_pct": 100 * max(cpu_s for cpu_s, _ in waiting) / IDLE_S,
            "idle_wakeups": max(wakeups for _, wakeups in waiting),
            "idle_trainer_cpu_pct": 100 * max(found[index][0] for index in self._trainers) / IDLE_S,
            "idle_trainer_wakeups": max(found[index][1] for index in self._trainers),
        }

    def count_calls(self, version: int) -> Cell:
        """Calls of Python functions during one update, in all processes."""
        num_puts = self.extras(0)["num_puts"]
        self.update(version)
        calls: dict[str, int] = {}
        for counted in self.everywhere("counted"):
            for name, count in counted.items():
                calls[name] = calls.get(name, 0) + count
        num_groups = self.extras(0)["num_puts"] - num_puts
        most = sorted(calls.items(), key=lambda item: -item[1])[:12]
        return {"num_calls": sum(calls.values()), "num_groups": num_groups, "most_called": most}

    def close(self) -> None:
        try:
            self.everywhere("close")
        except WorkerFailed as exc:
            print(f"close: {str(exc)[-300:]}", file=sys.stderr)

    def _memcpy(self) -> float:
        if not self._has_memcpy:
            return 0.0
        (taken_s,) = self._launcher.call([0], "memcpy")()
        return float(taken_s)

    def _pushed(self, version: int) -> list[Timing]:
        return [Timing(*timing) for timing in self._launcher.call(self._trainers, "push", version)()]

    def _pull(self, version: int, tokens: list[Any] | None = None) -> Callable[[], list[Timing]]:
        waiting = self._launcher.call(self._rollouts, "pull", version, tokens)
        return lambda: [Timing(*timing) for timing in waiting()]


def usage(pid: int) -> tuple[float, int]:
    """CPU seconds so far, and how often its threads have gone to sleep."""
    cpu_ns, num_sleeps = 0, 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        cpu_ns += int((thread / "schedstat").read_text().split()[0])
        for line in (thread / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                num_sleeps += int(line.split()[1])
    return cpu_ns / 1e9, num_sleeps


if __name__ == "__main__":
    main()
