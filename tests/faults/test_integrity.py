"""Wrong bytes: lost, changed under way, or changed while they were read. None becomes a version unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import wbridge
from tests.unit.session.job import MODES, PATIENCE_S, Job, gather, running
from wbridge.config import Config
from wbridge.device.base import Access, Event
from wbridge.errors import ProtocolError, UpdateAborted
from wbridge.session import worker
from wbridge.staging.pinned import PinnedSender, Snapshot
from wbridge.testing.faults import Faults, FaultyTransport
from wbridge.transport.select import Transports

pytestmark = pytest.mark.anyio
ONE = {"engine-0": 1}


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> list[FaultyTransport]:
    """What makes the transports of the rollout workers lose what is put into them."""
    found: list[FaultyTransport] = []

    def open_transports(config: Config, token: str, *, name: str, access: Access, **_: object) -> Transports:
        transports = Transports(config, token, name=name, access=access)
        if name.startswith("rollout/"):
            found.append(FaultyTransport(transports._loopback))
            monkeypatch.setattr(transports, "expose", found[-1].expose)
        return transports

    monkeypatch.setattr(worker, "open_transports", open_transports)
    return found


async def roll_until(job: Job, version: int) -> list[str]:
    """Poll on all receivers until they have `version`; returns what the polls raised meanwhile."""
    raised: list[str] = []

    async def roll(receiver: wbridge.ReceiverAdapter) -> None:
        while receiver.version != version:
            try:
                await receiver.poll_requests(wait_s=PATIENCE_S)
            except UpdateAborted as exc:
                assert receiver.version is None
                raised.append(str(exc))

    await gather(*[lambda r=receiver: roll(r) for receiver in job.receivers])
    return raised


async def verify(job: Job) -> wbridge.Verification:
    return (await gather(*[sender.verify for sender in job.senders]))[0]


@pytest.mark.parametrize("mode", MODES)
async def test_c62_with_checksums_lost_bytes_are_never_applied(
    mode: str, tmp_path: Path, faulty: list[FaultyTransport]
) -> None:
    async with running(tmp_path, mode, num_trainers=1, engines=ONE, checksum="on") as job:
        await job.update(1)
        faulty[0].faults = Faults(lose_rate=1.0)
        outcomes: list[str] = []

        async def send() -> None:
            outcomes.append((await (await job.send(2))[0].applied())["engine-0"])
            faulty[0].faults = Faults()
            outcomes.append((await (await job.send(3))[0].applied())["engine-0"])

        await gather(send, lambda: roll_until(job, 3))
        assert faulty[0].num_lost
        assert outcomes == ["aborted", "applied"]
        assert job.holds(3) and (await verify(job)).equal


@pytest.mark.parametrize("mode", MODES)
async def test_c62_without_checksums_verify_finds_lost_bytes(
    mode: str, tmp_path: Path, faulty: list[FaultyTransport]
) -> None:
    async with running(tmp_path, mode, num_trainers=1, engines=ONE, checksum="off") as job:
        faulty[0].faults = Faults(lose_rate=1.0)
        await job.update(1)
        (engine,) = (await verify(job)).engines
        assert engine.outcome == "different" and engine.version == 1
        assert {d.tensor for d in engine.different} == set(job.trainers[0].parameters)


@pytest.mark.parametrize("mode", ["sync", "sender_overlap"])
async def test_c55_after_half_a_version_the_next_one_is_whole(
    mode: str, tmp_path: Path, faulty: list[FaultyTransport]
) -> None:
    """Half of version 2 is written over version 1 when the other half turns out wrong: with a ring of one
    slot, no group comes before the one ahead of it has been written."""
    async with running(tmp_path, mode, num_trainers=1, engines=ONE, checksum="on", num_slots=1) as job:
        await job.update(1)
        count = faulty[0]._num_exposed
        faulty[0].faults = Faults(lose_exposures=frozenset(range(count + count // 2, 2 * count)))
        deliveries: list[wbridge.Delivery] = []

        async def send() -> None:
            deliveries.extend(await job.send(2))
            assert await deliveries[0].applied() == {"engine-0": "tainted"}
            (engine,) = (await verify(job)).engines
            assert engine.outcome == "tainted" and engine.version is None
            faulty[0].faults = Faults()
            await job.send(3)

        _, raised = await gather(send, lambda: roll_until(job, 3))
        assert len(raised) == 1 and "until a whole version lands" in raised[0]
        assert job.holds(3) and (await verify(job)).equal


def changing(job: Callable[[], Job]) -> Any:  # Any: a test double
    """Hooks that change the weights of rank 0 while the first version is read from them."""

    class Hooks:
        has_changed = False

        def before_apply(self) -> None:
            if not self.has_changed:
                self.has_changed = True
                job().trainers[0].parameters["q.weight"][2, 3] += 1.0

        def after_apply(self, update: wbridge.Update | None) -> None:
            return

    return Hooks()


async def test_c47_a_change_under_direct_reads_is_named(tmp_path: Path) -> None:
    """The engine asks for bytes only after `before_apply`, which is after the source was taken."""
    jobs: list[Job] = []
    hooks = {0: changing(lambda: jobs[0])}
    async with running(tmp_path, "sync", engines=ONE, hooks=hooks, debug_source=True) as job:
        jobs.append(job)
        for trainer in job.trainers:
            trainer.set_version(1)

        async def send(index: int) -> None:
            if index == 0:
                with pytest.raises(ProtocolError, match=r"trainer\[0\]: 'q.weight' changed while version 1"):
                    await job.senders[0].send_weights(1)
            else:
                await job.senders[index].send_weights(1)
            job.trainers[index].set_version(2)
            await job.senders[index].send_weights(2)

        await gather(lambda: send(0), lambda: send(1), lambda: roll_until(job, 2))  # type: ignore[arg-type]
        assert job.holds(2) and (await verify(job)).equal


async def test_c47_a_change_under_the_snapshot_reaches_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, "async", engines=ONE, debug_source=True) as job:
        await job.update(1)
        snapshot = PinnedSender.snapshot

        async def change_and_snapshot(self: PinnedSender, after: Event) -> Snapshot:
            job.trainers[1].parameters["norm.weight"][0] -= 1.0
            return await snapshot(self, after)

        async def send(index: int) -> None:
            if index == 1:
                monkeypatch.setattr(PinnedSender, "snapshot", change_and_snapshot)
                with pytest.raises(ProtocolError, match=r"trainer\[1\]: 'norm.weight' changed while"):
                    await job.senders[1].send_weights(2)
            else:
                delivery = await job.senders[0].send_weights(2)
                with pytest.raises(UpdateAborted, match=r"version 2: trainer rank 1"):
                    await delivery.applied()

        await gather(lambda: send(1), lambda: send(0))
        assert job.receivers[0].version == 1
        monkeypatch.setattr(PinnedSender, "snapshot", snapshot)
        await job.update(3)
        assert job.holds(3) and (await verify(job)).equal


@pytest.mark.parametrize("mode", MODES)
async def test_the_fence_finds_nothing_where_nothing_changes(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode, debug_source=True) as job:
        for version in (1, 2, 3):
            await job.update(version)
            assert job.holds(version)
        with anyio.fail_after(PATIENCE_S):
            assert (await verify(job)).equal
