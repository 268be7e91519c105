"""No thread of an update makes a GPU, or itself, wait for all that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.gpu.accelerator import Accelerator
from tests.gpu.model import WAYS, checkpoint_of, is_exactly, load, pair
from tests.unit.session.job import PATIENCE_S, together

pytestmark = pytest.mark.gpu

NUM_WARM = 2
VERSIONS = (3, 4, 5, 6, 7)


@contextmanager
def no_synchronization(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A call that waits for a device or a whole stream raises, in whichever thread."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a device or a stream was synchronized in a steady-state update")

    if not accelerator.is_gpu:
        yield
        return
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", refuse)
        patch.setattr(torch.cuda.Stream, "synchronize", refuse)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("mode", "way"), WAYS)
def test_a_steady_update_synchronizes_nothing(
    mode: str, way: str, accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(tmp_path, mode, accelerator, way=way) as job:
        prepared = {v: checkpoint_of(v, len(job.weights) // 2, accelerator.name) for v in VERSIONS}

        def train(version: int) -> None:
            with accelerator.stream():
                for name, tensor in prepared.get(version, {}).items():
                    job.weights[name].copy_(tensor)
                delivery = job.sender.send_weights(version)
                assert delivery.applied() == {"engine-0": "applied"}

        def roll() -> None:
            with accelerator.stream():
                assert job.receiver.poll_requests(wait_s=PATIENCE_S)

        for version in range(1, 1 + NUM_WARM):
            together(lambda v=version: train(v), roll)
        accelerator.finish()
        with no_synchronization(accelerator, monkeypatch):
            for version in VERSIONS:
                together(lambda v=version: train(v), roll)
        accelerator.finish()
        assert is_exactly(job.parameters, VERSIONS[-1])


def test_the_check_sees_other_threads(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would show nothing."""
    if not accelerator.is_gpu:
        pytest.skip("nothing to synchronize on the host")
    tensor = torch.ones(4, device=accelerator.name)
    with no_synchronization(accelerator, monkeypatch):
        for synchronize in (lambda: tensor.sum().item(), lambda: tensor.cpu()):
            with pytest.raises(RuntimeError, match="synchroniz"):
                together(synchronize)


@pytest.mark.parametrize(
    ("mode", "way"), [("sync", "shared_memory"), ("async", "shared_memory"), ("sync", "in place")]
)
def test_c69_two_hundred_updates_leave_no_memory_behind(
    mode: str, way: str, accelerator: Accelerator, tmp_path: Path
) -> None:
    """Less than one version is kept: 64 MB in 180 updates would be 370 kB in each."""
    with pair(tmp_path, mode, accelerator, way=way) as job:

        def update(version: int) -> None:
            together(
                lambda: job.sender.send_weights(version).applied(),
                lambda: job.receiver.poll_requests(wait_s=PATIENCE_S),
            )

        def held() -> tuple[int, int]:
            accelerator.finish()
            allocated = torch.cuda.memory_allocated() if accelerator.is_gpu else 0
            return allocated, accelerator.used_nbytes()

        load(job.weights, 1)
        num_updates = 200 if accelerator.is_gpu else 30
        before = held()
        for version in range(1, num_updates + 1):
            update(version)
            if version == 20:
                before = held()
        after = held()
        assert is_exactly(job.parameters, 1)
    assert after[0] == before[0], "bytes that torch has allocated"
    assert after[1] - before[1] < 16 * 2**20, "bytes of the GPU that are in use, by whomever"
