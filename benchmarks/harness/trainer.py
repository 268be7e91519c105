"""A trainer process: publishes versions after steps on a timer, and copies its shard in between."""

from __future__ import annotations

import time

import torch

import wbridge.sync
from benchmarks.harness.cost import measure
from benchmarks.harness.job import PATIENCE_S, Channels, Settings, TrainerReport
from benchmarks.harness.model import LAYER_HALF_NBYTES, fill, trainer_source
from wbridge.device.mirror import Mirror
from wbridge.device.select import open_device


def run_trainer(rank: int, settings: Settings, channels: Channels) -> None:
    torch.set_num_threads(1)
    report = TrainerReport(rank, shard_nbytes=settings.num_layers * LAYER_HALF_NBYTES)
    source, parameters = trainer_source(rank, settings.num_trainers, settings.num_layers)
    device = open_device("cpu")
    # What the snapshot of the overlapping modes is made with, without anything around it.
    mirror, stream = Mirror(device, parameters, parameters), device.open_stream("bare copy")
    with wbridge.sync.SenderAdapter(source, **settings.adapter_arguments) as sender:
        sender.connect()
        version = 0
        for update in range(settings.num_updates + 1):
            for place in range(settings.burst):
                version += 1
                fill(parameters, version)
                time.sleep(settings.compute_s)
                channels.trainers.wait(PATIENCE_S)
                delivery, cost = measure(lambda: sender.send_weights(version))  # noqa: B023  # called here
                if update:  # the first warms up
                    report.sends.append((version, place, cost))
            delivery.applied()
            time.sleep(settings.settle_s)
            fill(parameters, version)
            channels.trainers.wait(PATIENCE_S)
            _, cost = measure(lambda: mirror.copy(stream).synchronize())
            if update:
                report.copies.append(cost)
            time.sleep(settings.settle_s / 2)
        while set(delivery.applied().values()) != {"applied"}:  # `latest` may have skipped an engine
            time.sleep(settings.settle_s)
            delivery = sender.send_weights(version)
        channels.trained.set()
        report.put_nbytes = sender.counters["put_nbytes"]
        channels.results.put(report)
        channels.left.wait(PATIENCE_S)
    device.close()
