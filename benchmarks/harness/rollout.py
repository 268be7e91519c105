"""A rollout process: polls after each step on a timer, and copies ring to parameters in between."""

from __future__ import annotations

import time

import torch

import wbridge.sync
from benchmarks.harness.cost import Cost, measure
from benchmarks.harness.job import PATIENCE_S, Channels, RolloutReport, Settings
from benchmarks.harness.model import Parameters, holds, rollout_target
from wbridge.cli.measure import time_change
from wbridge.device.select import open_device
from wbridge.plan.types import Group
from wbridge.staging.pinned import PinnedReceiver


def run_rollout(number: int, settings: Settings, channels: Channels) -> None:
    torch.set_num_threads(1)
    engine, rank = divmod(number, settings.tensor_parallel)
    target, parameters = rollout_target(
        settings.engines[engine], rank, settings.tensor_parallel, settings.num_layers
    )
    report = RolloutReport(engine, rank)
    with wbridge.sync.ReceiverAdapter(target, **settings.adapter_arguments) as receiver:
        receiver.connect()
        bare = BareCopy(parameters, groups_of(receiver))
        follow(receiver, bare, report, settings, channels)
        report.is_whole = receiver.version is not None and holds(parameters, receiver.version)
    bare.close()
    channels.results.put(report)


def follow(
    receiver: wbridge.sync.ReceiverAdapter,
    bare: BareCopy,
    report: RolloutReport,
    settings: Settings,
    channels: Channels,
) -> None:
    """Step until the trainers have trained; measure every poll that has something to do."""
    nap_s = settings.nap_s if report.engine == settings.num_engines - 1 else 0.0
    step, copy_step, asked_s = 0, -1, 0.0
    while True:
        compute(settings, report.engine)
        if leaves(report, step, channels):
            return
        if step == copy_step:
            version = receiver.version or 0
            report.copies.append((version, bare.run()))
            report.changes.append((version, time_change(receiver._rollout._worker.loop)))
        update, cost = measure(receiver.poll_requests)
        if update is None:
            asked_s += cost.wall_s
        else:
            report.polls.append((update.version, asked_s, cost))
            asked_s, copy_step = 0.0, step + settings.settle_steps
            time.sleep(nap_s)
        report.steps.append((cost.end_s, -1 if receiver.version is None else receiver.version))
        step += 1


def compute(settings: Settings, engine: int) -> None:
    """Sleep until the end of this engine's step, which no other engine's step ends at."""
    phase_s = settings.step_s * engine / settings.num_engines
    time.sleep(settings.step_s - (time.monotonic() - phase_s) % settings.step_s)


def leaves(report: RolloutReport, step: int, channels: Channels) -> bool:
    """End a step together with the other workers of the engine; whether it was the last one."""
    last_step = channels.last_steps[report.engine]
    if report.rank == 0 and channels.trained.is_set():
        last_step.value = step
    channels.engines[report.engine].wait(PATIENCE_S)
    return bool(last_step.value == step)


def groups_of(receiver: wbridge.sync.ReceiverAdapter) -> tuple[Group, ...]:
    """What this worker receives. The plan is no public property of an adapter."""
    engine = receiver._rollout._engine
    assert engine is not None
    return engine._context.plan.incoming


class BareCopy:
    """The copy from a whole version in host memory into parameters, without anything around it.

    The memory is of the benchmark's own on both ends, so that live weights keep their version.
    """

    def __init__(self, parameters: Parameters, groups: tuple[Group, ...]) -> None:
        self._device = open_device("cpu")
        self._groups = groups
        twins = {name: torch.full_like(tensor, -1) for name, tensor in parameters.items()}
        self._staging = PinnedReceiver(self._device, twins, groups, num_slots=len(groups))

    def run(self) -> Cost:
        return measure(self._copy)[1]

    def _copy(self) -> None:
        events = [self._staging.scatter(group, slot) for slot, group in enumerate(self._groups)]
        for event in events:
            event.synchronize()

    def close(self) -> None:
        self._staging.close()
        self._device.close()
