"""Updates follow the order of the application's streams, and nobody waits on the host for it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

import wbridge.sync
from benchmarks.harness.model import Parameters
from tests.gpu.accelerator import Accelerator
from tests.gpu.model import WAYS, is_exactly, load, pair
from tests.unit.session.job import MODES, PATIENCE_S, together
from wbridge.device.select import open_device

pytestmark = pytest.mark.gpu

VERSIONS = (1, 2, 3, 4)


def take(receiver: wbridge.sync.ReceiverAdapter) -> int:
    update = receiver.poll_requests(wait_s=PATIENCE_S)
    assert update is not None, "no update in time"
    return update.version


@pytest.mark.parametrize(("mode", "way"), WAYS)
def test_c47_weights_may_change_as_soon_as_a_send_has_returned(
    mode: str, way: str, accelerator: Accelerator, tmp_path: Path
) -> None:
    """The step before is still running when the send is called, the next one is launched right after it."""
    with pair(tmp_path, mode, accelerator, way=way) as job:

        def train() -> None:
            with accelerator.stream():
                for version in VERSIONS:
                    accelerator.work(20)
                    load(job.weights, version)
                    job.sender.send_weights(version)
                    for tensor in job.weights.values():
                        tensor.fill_(-7.0)

        def roll() -> list[tuple[int, bool]]:
            with accelerator.stream():
                return [
                    (version := take(job.receiver), is_exactly(job.parameters, version)) for _ in VERSIONS
                ]

        _, seen = together(train, roll)
    assert seen == [(version, True) for version in VERSIONS]


@pytest.mark.parametrize("mode", MODES)
def test_a_send_waits_for_the_stream_that_it_is_given(
    mode: str, accelerator: Accelerator, tmp_path: Path
) -> None:
    """The optimizer runs on a side stream; the current one of the caller has nothing to do with it."""
    with closing(open_device(accelerator.name)) as device, pair(tmp_path, mode, accelerator) as job:

        def train() -> None:
            for version in VERSIONS:
                with accelerator.stream():
                    side = torch.cuda.current_stream() if accelerator.is_gpu else device.current_stream()
                    accelerator.work(50)
                    load(job.weights, version)
                job.sender.send_weights(version, stream=side)

        def roll() -> list[tuple[int, bool]]:
            return [(version := take(job.receiver), is_exactly(job.parameters, version)) for _ in VERSIONS]

        _, seen = together(train, roll)
    assert seen == [(version, True) for version in VERSIONS]


@pytest.mark.parametrize(("mode", "way"), WAYS)
def test_a_running_step_reads_the_old_version_and_the_next_one_the_new(
    mode: str, way: str, accelerator: Accelerator, tmp_path: Path
) -> None:
    """A step's kernels still run when the poll writes the weights, and nothing waits in between."""

    def read() -> Parameters:
        accelerator.work(20)
        return {name: tensor.clone() for name, tensor in job.parameters.items()}

    def train() -> None:
        for version in VERSIONS:
            load(job.weights, version)
            job.sender.send_weights(version)

    def roll() -> list[tuple[int, Parameters, Parameters]]:
        found = []
        with accelerator.stream():
            for _ in VERSIONS:
                before = read()
                version = take(job.receiver)
                found.append((version, before, read()))
        return found

    with pair(tmp_path, mode, accelerator, way=way) as job:
        load(job.parameters, 0)
        accelerator.finish()
        _, steps = together(train, roll)
        accelerator.finish()
    for version, before, after in steps:
        assert is_exactly(before, version - 1)
        assert is_exactly(after, version)
    assert [version for version, _, _ in steps] == list(VERSIONS)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_a_step_of_another_thread_reads_is_not_overwritten(
    mode: str, accelerator: Accelerator, tmp_path: Path
) -> None:
    """It has ended, on a stream of that thread, and its kernels still run when the poll is made."""
    seen: list[Parameters] = []

    def train() -> None:
        for version in VERSIONS:
            load(job.weights, version)
            job.sender.send_weights(version)

    def step() -> None:
        with accelerator.stream(), job.receiver.step():
            accelerator.work(20)
            seen.append({name: tensor.clone() for name, tensor in job.parameters.items()})

    def roll() -> None:
        for version in VERSIONS:
            assert take(job.receiver) == version
            together(step)

    with pair(tmp_path, mode, accelerator) as job:
        together(train, roll)
        accelerator.finish()
    assert [is_exactly(read, version) for version, read in zip(VERSIONS, seen, strict=True)] == [True] * 4
