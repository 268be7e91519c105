"""Idle polls of one engine: their CPU time, the system calls of the polling thread, the frames sent."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import wbridge.sync
from benchmarks.harness.job import PATIENCE_S, Channels, Settings, TrainerReport
from benchmarks.harness.model import rollout_target, trainer_source
from benchmarks.harness.syscalls import count_system_calls

NUM_POLLS = 10_000
SENDING = ("send", "sendall", "sendmsg", "sendto")


@dataclass
class IdleReport:
    """What one rollout worker measured in `NUM_POLLS` polls without an update."""

    rank: int
    median_cpu_s: float
    num_system_calls: int
    num_frames: int


def run_idle_trainer(rank: int, settings: Settings, channels: Channels) -> None:
    """Publish one version, then keep still until the engine has left."""
    torch.set_num_threads(1)
    source, _ = trainer_source(rank, settings.num_trainers, settings.num_layers)
    with wbridge.sync.SenderAdapter(source, **settings.adapter_arguments) as sender:
        sender.connect()
        sender.send_weights(1).applied()
        channels.results.put(TrainerReport(rank))
        channels.left.wait(PATIENCE_S)


def run_idle_rollout(number: int, settings: Settings, channels: Channels) -> None:
    """Take one version, then poll in a loop together with the other workers of the engine."""
    torch.set_num_threads(1)
    num_sent = count_socket_sends()
    target, _ = rollout_target(settings.engines[0], number, settings.tensor_parallel, settings.num_layers)
    with wbridge.sync.ReceiverAdapter(target, **settings.adapter_arguments) as receiver:
        receiver.connect()
        while receiver.poll_requests(wait_s=1.0) is None:
            pass
        time.sleep(1.0)  # what the update has left to say is said by then

        def num_frames() -> int:
            counters = receiver.counters
            return num_sent() + counters["messages"] + counters["puts"]

        together = channels.engines[0]
        together.wait(PATIENCE_S)
        frames_before = num_frames()
        median_cpu_s = time_polls(receiver.poll_requests)
        together.wait(PATIENCE_S)
        num_system_calls = count_system_calls(lambda: poll_often(receiver.poll_requests))
        together.wait(PATIENCE_S)
        report = IdleReport(number, median_cpu_s, num_system_calls, num_frames() - frames_before)
    channels.results.put(report)


def time_polls(poll: Callable[[], object]) -> float:
    """The median CPU time of a poll, that of reading the clock included."""
    clock, times_ns = time.thread_time_ns, []
    for _ in range(NUM_POLLS):
        begin_ns = clock()
        update = poll()
        times_ns.append(clock() - begin_ns)
        assert update is None, "there was nothing to receive"
    return statistics.median(times_ns) / 1e9


def poll_often(poll: Callable[[], object]) -> None:
    for _ in range(NUM_POLLS):
        poll()


def count_socket_sends() -> Callable[[], int]:
    """Count every send on any socket of this process from now on: control, engine link and transport.

    Event loops call these methods by name, so a wrapper on the class sees them all.
    """
    lock, count = threading.Lock(), 0

    def counted(method: Callable[..., object]) -> Callable[..., object]:
        def send(*arguments: object) -> object:
            nonlocal count
            with lock:
                count += 1
            return method(*arguments)

        return send

    for name in SENDING:
        setattr(socket.socket, name, counted(getattr(socket.socket, name)))
    return lambda: count
