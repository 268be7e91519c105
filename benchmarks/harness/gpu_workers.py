"""The two processes of a job on one device: what they do with each version, and what they time."""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path

import torch

import wbridge
import wbridge.sync
from benchmarks.harness.gpu_clock import Clock, Products
from benchmarks.harness.gpu_job import Channels, Held, Job, RolloutReport, TrainerReport
from benchmarks.harness.model import Parameters, fill, holds, rollout_target, trainer_source

POLL_PAUSE_S = 0.001
"""A step of an engine that computes nothing."""
IDLE_STEPS = 60
IDLE_S = 0.1
"""How long an engine that computes does so with nothing on its way, to compare with."""


class Copies:
    """Plain copies of all parameters, each tensor on its own, as a user would write them."""

    def __init__(self, clock: Clock, parameters: Parameters) -> None:
        self._clock = clock
        self._parameters = parameters
        self._host = {name: clock.host_memory(tensor) for name, tensor in parameters.items()}
        self._twins = {name: torch.empty_like(tensor) for name, tensor in parameters.items()}

    def to_host_s(self) -> float:
        return self._clock.wall_s(lambda: copy(self._host, self._parameters))

    def from_host_s(self) -> float:
        return self._clock.wall_s(lambda: copy(self._twins, self._host))

    def on_device_s(self) -> float:
        return self._clock.wall_s(lambda: copy(self._twins, self._parameters))


def copy(targets: Parameters, sources: Parameters) -> None:
    for name, target in targets.items():
        target.copy_(sources[name], non_blocking=True)


def run_trainer(job: Job, channels: Channels) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(0.9 * job.limit_s)  # of a process that hangs, before it is killed
    source, weights = trainer_source(0, 1, job.num_layers, device=job.device)
    clock, report = Clock(job.device), TrainerReport()
    report.shard_nbytes = sum(tensor.nbytes for tensor in weights.values())
    copies = Copies(clock, weights)
    products = Products(clock) if job.computes == "trainer" else None
    with wbridge.sync.SenderAdapter(source, **job.adapter_arguments) as sender:
        channels.meet()
        before = held(clock)
        channels.meet()
        sender.connect()
        for version in range(1, job.num_updates + 2):
            send(sender, weights, version, clock, products, report, leave_idle=job.computes == "rollout")
            channels.meet()
            report.copies_s.append(copies.to_host_s())
            if products is not None:
                report.idle += products.run(IDLE_STEPS)
            channels.meet()
            channels.meet()
        report.held = grown(before, held(clock))
        forget_first(report)
        channels.results.put(report)
        channels.meet()


def send(
    sender: wbridge.sync.SenderAdapter,
    weights: Parameters,
    version: int,
    clock: Clock,
    products: Products | None,
    report: TrainerReport,
    *,
    leave_idle: bool,
) -> None:
    """Send until the engine has applied it; compute meanwhile, if that is asked for."""
    fill(weights, version)
    clock.finish()
    if leave_idle:
        time.sleep(IDLE_S)
    while True:
        called_s = time.perf_counter()
        delivery = sender.send_weights(version)
        returned_s = time.perf_counter()
        steps = []
        if products is not None:
            while not delivery.outcomes:
                if step := products.step():
                    steps.append(step)
            steps += products.drain()
        delivery.landed()
        landed_s = time.perf_counter()
        if set(delivery.applied().values()) == {"applied"}:
            break
        report.num_missed += 1
    report.updates_s.append(time.perf_counter() - called_s)
    report.stalls_s.append(returned_s - called_s)
    report.sends.append((called_s, returned_s, landed_s))
    report.busy += steps if version > 1 else []


def run_rollout(job: Job, channels: Channels) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(0.9 * job.limit_s)
    target, parameters = rollout_target("engine-0", 0, 1, job.num_layers, device=job.device)
    if job.in_place:
        wbridge.share_memory(parameters.values())
    clock, report = Clock(job.device), RolloutReport()
    copies = Copies(clock, parameters)
    products = Products(clock) if job.computes == "rollout" else None
    with wbridge.sync.ReceiverAdapter(target, **job.adapter_arguments) as receiver:
        channels.meet()
        before = held(clock)
        channels.meet()
        receiver.connect()
        for _ in range(job.num_updates + 1):
            report.stalls_s.append(follow(receiver, clock, products, report))
            channels.meet()
            channels.meet()
            report.copies_s.append(copies.from_host_s())
            report.device_copies_s.append(copies.on_device_s())
            channels.meet()
        report.held = grown(before, held(clock))
        report.is_whole = receiver.version is not None and holds(parameters, receiver.version)
        forget_first(report)
        channels.results.put(report)
        channels.meet()


def follow(
    receiver: wbridge.sync.ReceiverAdapter, clock: Clock, products: Products | None, report: RolloutReport
) -> float:
    """Step and poll until a version is applied; return how long its polls kept the next step waiting."""
    asked_s = 0.0
    while True:
        if products is None:
            time.sleep(POLL_PAUSE_S)
        elif step := products.step():
            report.steps.append(step)
        begin_s = time.perf_counter()
        update = receiver.poll_requests()
        if update is None:
            asked_s += time.perf_counter() - begin_s
            continue
        if products is None:  # else the steps that were launched before it would count
            clock.finish()
        stall_s = asked_s + time.perf_counter() - begin_s
        if products is not None:
            products.drain()
        return stall_s


def forget_first(report: TrainerReport | RolloutReport) -> None:
    """The first version warms up."""
    for name, values in vars(report).items():
        if name.endswith("_s") or name == "sends":
            del values[0]


def held(clock: Clock) -> Held:
    status = Path("/proc/self/status").read_text()
    resident_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return Held(clock.allocated_nbytes(), 1024 * resident_kb, clock.used_nbytes())


def grown(before: Held, after: Held) -> Held:
    return Held(
        after.torch_nbytes - before.torch_nbytes,
        after.resident_nbytes - before.resident_nbytes,
        after.device_nbytes - before.device_nbytes,
    )
