"""The copies of one version: started at once, waited for together, and given back in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from wbridge.device.base import Event
from wbridge.device.cpu import CpuDevice
from wbridge.engine.scatters import Scatters
from wbridge.errors import UpdateAborted
from wbridge.ids import WorkerId
from wbridge.layout.region import Strided
from wbridge.plan.types import Group, Piece, Transfer
from wbridge.staging.pinned import PinnedReceiver

pytestmark = pytest.mark.anyio
TRAINER = WorkerId("trainer", "trainer", (1,), (0,))
ROLLOUT = WorkerId("rollout", "engine", (1,), (0,))
NUM_GROUPS = 8


def group(index: int) -> Group:
    """Group `index` is element `index` of the parameter."""
    transfer = Transfer(
        tensor="t",
        extents=(1,),
        source_parameter="s",
        source=Strided(0, (1,)),
        target_parameter="p",
        target=Strided(index, (1,)),
        wire=Strided(0, (1,)),
        wire_dtype="float32",
        slot_offset=0,
    )
    piece = Piece(writer=TRAINER, offset=0, nbytes=4, transfers=(transfer,))
    return Group(receiver=ROLLOUT, index=index, nbytes=4, pieces=(piece,))


GROUPS = tuple(group(index) for index in range(NUM_GROUPS))


class Job:
    """A parameter, a ring whose slot k holds the number k + 1, and a device as late as a real one may be.

    `num_waits` counts how often somebody had to wait for an event that was not done.
    """

    def __init__(self, num_slots: int) -> None:
        self.device = CpuDevice(seed=3, max_held=10_000)
        self.parameter = torch.zeros(NUM_GROUPS)
        self.staging = PinnedReceiver(self.device, {"p": self.parameter}, GROUPS, num_slots=num_slots)
        for slot in range(num_slots):
            view = self.staging.slot_view(slot, 0, 4)
            view[:] = torch.tensor([slot + 1.0]).view(torch.uint8).numpy().tobytes()
        self.num_waits = 0
        self.stopped: list[int] = []
        self.failures: list[Exception] = []
        self.wants_slots = False
        self.scatters = Scatters(
            self,  # type: ignore[arg-type]  # of the staging it needs `scatter`
            stopped=self.stopped.append,
            failed=self.failures.append,
            wants_slots=lambda: self.wants_slots,
        )

    def scatter(self, group: Group, slot: int, *, after: Event | None = None) -> Any:
        return CountedEvent(self.staging.scatter(group, slot, after=after), self._count)

    def _count(self) -> None:
        self.num_waits += 1

    def start(self, index: int) -> None:
        self.scatters.start(GROUPS[index], index % self.staging.num_slots, after=None)


class CountedEvent:
    def __init__(self, event: Event, count: Callable[[], None]) -> None:
        self.event = event
        self.count = count

    async def wait(self) -> None:
        if not self.event.is_done():
            self.count()
        await self.event.wait()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(num_slots=NUM_GROUPS)
    yield made
    made.staging.close()
    made.device.close()


async def test_a_landed_version_costs_one_wait(job: Job) -> None:
    for index in range(NUM_GROUPS):
        job.start(index)
    job.scatters.close()
    await job.scatters.run()
    assert job.stopped == []  # whoever waits for the copies does not wait for this
    job.scatters.release()
    assert job.num_waits == 1
    assert job.stopped == list(range(NUM_GROUPS))
    assert torch.equal(job.parameter, torch.arange(NUM_GROUPS) + 1.0)


async def test_slots_come_back_one_by_one_while_they_are_wanted(job: Job) -> None:
    job.wants_slots = True
    for index in range(NUM_GROUPS):
        job.start(index)
    job.scatters.close()
    seen: list[int] = []

    def stopped(slot: int) -> None:
        assert not seen or slot == len(seen)
        seen.append(job.num_waits)

    job.scatters._stopped = stopped
    await job.scatters.run()
    job.scatters.release()
    assert seen == sorted(seen)
    assert len(seen) == NUM_GROUPS
    assert seen[0] == 1  # the first slot is back after the first wait


async def test_what_starts_later_is_waited_for_too(job: Job) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(job.scatters.run)
        for index in range(3):
            await anyio.wait_all_tasks_blocked()
            job.start(index)
        await anyio.wait_all_tasks_blocked()
        job.scatters.close()
    job.scatters.release()
    assert job.stopped == [0, 1, 2]
    assert job.parameter.tolist()[:4] == [1.0, 2.0, 3.0, 0.0]


async def test_nothing_at_all_ends_at_once(job: Job) -> None:
    job.scatters.close()
    await job.scatters.run()
    assert (job.stopped, job.num_waits, job.scatters.error) == ([], 0, None)


async def test_a_copy_that_fails_keeps_no_slot_and_hides_no_error(job: Job) -> None:
    """It fails on the stream: the copies behind it were started already, and stop before `run` returns."""
    scatter = job.staging._ring.scatter

    def fail(*args: Any) -> Event:
        if args[1] == 1:
            job.staging._ring._stream.submit(lambda: 1 / 0)
        return scatter(*args)

    job.staging._ring.scatter = fail  # type: ignore[method-assign]  # a device that fails once
    for index in range(3):
        job.start(index)
    job.scatters.close()
    await job.scatters.run()
    job.scatters.release()
    assert job.stopped == [0, 1, 2]
    assert [type(error) for error in job.failures] == [ZeroDivisionError]
    assert job.scatters.error is job.failures[0]


async def test_a_copy_that_has_failed_by_now_is_waited_for() -> None:
    """Its event is done, which does not tell how it ended; a stream of a GPU is often that far."""
    device = CpuDevice()
    parameter = torch.zeros(NUM_GROUPS)
    staging = PinnedReceiver(device, {"p": parameter}, GROUPS, num_slots=NUM_GROUPS)
    failures: list[Exception] = []
    scatters = Scatters(staging, stopped=lambda _: None, failed=failures.append, wants_slots=lambda: False)
    stream = staging._ring._stream
    stream.submit(lambda: 1 / 0)
    failed = stream.record()
    while not failed.is_done():
        await anyio.sleep(0.001)
    staging._ring.scatter = lambda *_: failed  # type: ignore[method-assign]  # a device that fails
    scatters.start(GROUPS[0], 0, after=None)
    assert not scatters.close_if_over()
    scatters.close()
    await scatters.run()
    assert [type(error) for error in failures] == [ZeroDivisionError]
    staging.close()
    device.close()


async def test_a_copy_that_does_not_start_gives_its_slot_back(job: Job) -> None:
    job.start(0)
    job.staging.close()
    job.start(1)
    job.start(2)
    job.scatters.close()
    await job.scatters.run()
    job.scatters.release()
    assert sorted(job.stopped) == [0, 1, 2]
    assert len(job.failures) == 1


async def test_a_slot_comes_back_only_after_what_follows_its_copy(job: Job) -> None:
    """What follows may fail: the copies are over all the same, and the error is known."""
    seen: list[list[int]] = []

    async def look() -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(list(job.stopped))
        raise UpdateAborted("changed meanwhile")

    job.wants_slots = True
    for index in range(3):
        job.scatters.start(GROUPS[index], index, after=None, then=look if index == 1 else None)
    job.scatters.close()
    await job.scatters.run()
    job.scatters.release()
    assert (seen, job.stopped) == ([[0]], [0, 1, 2])
    assert isinstance(job.scatters.error, UpdateAborted)
    assert job.failures == [job.scatters.error]
