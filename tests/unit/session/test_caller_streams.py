"""Whose stream an update follows: that of the thread which calls, as it was at the call.

On a device where each thread has a current stream of its own that is as late as it may be, as on a GPU: what
was submitted to it has not run when the next call is made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

import wbridge.sync
from tests.models.toy import Rollout, weights
from tests.unit.session.job import MODES, PATIENCE_S, rendezvous, settings, together, toys
from wbridge.device.cpu import CpuDevice, CpuStream

VERSIONS = (1, 2, 3)
ENGINES = {"engine-0": 1}


class CallerStreams(CpuDevice):
    """No stream runs anything before somebody waits for it, and each thread has a current one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._own = threading.local()
        self._opened: list[CpuStream] = []

    def open_stream(self, name: str, *, background: bool = False, on_host: bool = False) -> CpuStream:
        stream = CpuStream(name, lambda num_held: 0)
        stream.start()
        self._opened.append(stream)
        return stream

    def current_stream(self) -> CpuStream:  # type: ignore[override]  # this is what is different
        if not hasattr(self._own, "stream"):
            self._own.stream = self.open_stream("of a caller")
        stream: CpuStream = self._own.stream
        return stream

    def close(self) -> None:
        super().close()
        for stream in self._opened:
            stream.close()
            stream.join()


@pytest.fixture
def device() -> Iterator[CallerStreams]:
    with closing(CallerStreams()) as device:
        yield device


class Ends:
    """Both ends of a job in this process, and the weights of each."""

    def __init__(self, path: Path, mode: str, device: CallerStreams, **config: object) -> None:
        (self.trainer,), (self.rollout,) = toys(1, ENGINES)
        values = settings(mode, 1, delivery="every", **config)
        where = {"rendezvous": rendezvous(path), "config": values, "device": device}
        self.sender = wbridge.sync.SenderAdapter(self.trainer.source, **where)
        self.receiver = wbridge.sync.ReceiverAdapter(self.rollout.target, **where)

    def take(self) -> int:
        update = self.receiver.poll_requests(wait_s=PATIENCE_S)
        assert update is not None
        return update.version


@contextmanager
def connected(path: Path, mode: str, device: CallerStreams, **config: object) -> Iterator[Ends]:
    ends = Ends(path, mode, device, **config)
    with ends.sender, ends.receiver:
        together(ends.sender.connect, ends.receiver.connect)
        yield ends


@pytest.mark.parametrize("mode", MODES)
def test_what_a_trainer_has_submitted_before_a_send_is_sent(
    mode: str, device: CallerStreams, tmp_path: Path
) -> None:
    """And what it submits after it is not."""
    with connected(tmp_path, mode, device) as ends:

        def train() -> None:
            stream = device.current_stream()
            for version in VERSIONS:
                stream.submit(lambda v=version: ends.trainer.set_version(v))
                ends.sender.send_weights(version)
                stream.submit(lambda: [t.fill_(-7.0) for t in ends.trainer.parameters.values()])

        def roll() -> list[tuple[int, bool]]:
            return [(version := ends.take(), ends.rollout.holds(version)) for _ in VERSIONS]

        _, seen = together(train, roll)
    assert seen == [(version, True) for version in VERSIONS]


@pytest.mark.parametrize("where", ["the polling thread", "another thread"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_that_has_not_run_yet_reads_the_version_it_was_told(
    mode: str, where: str, device: CallerStreams, tmp_path: Path
) -> None:
    """For Python it has ended; what it submitted to the current stream of its thread has not begun."""
    seen: list[dict[str, torch.Tensor]] = []
    with connected(tmp_path, mode, device) as ends:
        parameters = ends.rollout.parameters

        def read() -> None:
            seen.append({name: tensor.clone() for name, tensor in parameters.items()})

        def step() -> None:
            with ends.receiver.step():
                device.current_stream().submit(read)

        def roll() -> None:
            for version in VERSIONS:
                assert ends.take() == version
                step() if where == "the polling thread" else together(step)

        def train() -> None:
            for version in VERSIONS:
                ends.trainer.set_version(version)
                ends.sender.send_weights(version)

        together(train, roll)
    device.close()
    for version, found in zip(VERSIONS, seen, strict=True):
        assert all(torch.equal(found[name], tensor) for name, tensor in held(version).items())


def held(version: int) -> dict[str, torch.Tensor]:
    """What a rollout holds of a version."""
    rollout = Rollout("engine-0", 0, 1)
    rollout.load_weights(weights(version).items())
    return rollout.parameters
