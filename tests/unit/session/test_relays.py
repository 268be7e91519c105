"""Engines that pass weights on to each other: what is sent by whom, whole versions, and relays that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import wbridge
from tests.unit.session.exchange import THREE, engine_of, exchanging, member_of
from tests.unit.session.job import MODES, Job, gather, rendezvous, settings, toys
from tests.unit.session.virtual import virtual
from wbridge.device.base import Event
from wbridge.errors import UpdateAborted
from wbridge.flow.actions import GiveCredit
from wbridge.flow.messages import Alive, Credit
from wbridge.staging.relay import RelayStaging
from wbridge.staging.slots import Place
from wbridge.testing.streams import LoopDevice
from wbridge.transport.loopback import LoopbackEndpoint

COPY_NBYTES = 11_140
"""Of the toy model."""


def sent(adapters: Any) -> int:
    return sum(adapter.counters["put_nbytes"] for adapter in adapters)


@pytest.mark.parametrize("mode", MODES)
@virtual
async def test_trainers_send_one_copy_and_every_host_gets_one(mode: str, tmp_path: Path) -> None:
    async with exchanging(tmp_path, mode, relay_patience_s=60.0) as job:
        for version in (1, 2, 3):
            deliveries, updates = await job.update(version)
            assert job.holds(version) and [update.version for update in updates] == [version] * 3
            assert await deliveries[0].applied() == dict.fromkeys(THREE, "applied")
            assert sent(job.senders) == version * COPY_NBYTES
            assert sent(job.receivers) == version * 2 * COPY_NBYTES
            received = [receiver.counters["received_nbytes"] for receiver in job.receivers]
            assert received == [version * COPY_NBYTES] * 3


@pytest.mark.parametrize("mode", MODES)
@virtual
async def test_workers_of_one_host_get_it_from_each_other(mode: str, tmp_path: Path) -> None:
    """Two hosts of two engines each: every group crosses once to each host."""
    engines = dict.fromkeys(("engine-0", "engine-1", "engine-2", "engine-3"), 1)
    hosts = {name: f"host-{k // 2}" for k, name in enumerate(engines)}
    async with exchanging(tmp_path, mode, engines=engines, hosts=hosts, relay_patience_s=60.0) as job:
        for version in (1, 2):
            await job.update(version)
            assert job.holds(version)
        assert (sent(job.senders), sent(job.receivers)) == (2 * COPY_NBYTES, 6 * COPY_NBYTES)
        routed = [member_of(job, k)._sources for k in range(4)]
        for group in range(len(engine_of(job, 0)._groups)):
            crossing = [
                k
                for k, sources in enumerate(routed)
                if (source := sources.get(group)) and hosts[source[8:16]] != hosts[f"engine-{k}"]
            ]
            entries = [k for k, sources in enumerate(routed) if group not in sources]
            assert len(entries) == len(crossing) == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (1, 4), (2,)])
@virtual
async def test_engines_of_any_layouts_take_one_copy_together(
    mode: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """Each on a host of its own; what several of its ranks need enters the host once."""
    engines = {f"engine-{k}": size for k, size in enumerate(sizes)}
    async with exchanging(tmp_path, mode, engines=engines, relay_patience_s=60.0) as job:
        for version in (1, 2):
            await job.update(version)
            assert job.holds(version)
        groups = [group for k in range(sum(sizes)) for group in engine_of(job, k)._groups]
        received = sum(piece.nbytes for group in groups for piece in group.pieces)
        assert sent(job.senders) == 2 * COPY_NBYTES
        assert sent(job.receivers) == 2 * (received - COPY_NBYTES)


@pytest.mark.parametrize("mode", ["sync", "async"])
@virtual
async def test_c68_models_of_one_process_with_equal_names_each_go_down_a_chain_of_their_own(
    mode: str, tmp_path: Path
) -> None:
    """A target and its draft: two jobs, whose engines bear the same names and pass on what they received."""
    (tmp_path / "target").mkdir()
    (tmp_path / "draft").mkdir()
    async with (
        exchanging(tmp_path / "target", mode, relay_patience_s=60.0) as target,
        exchanging(tmp_path / "draft", mode, relay_patience_s=60.0) as draft,
    ):
        for version in (1, 2):
            await gather(lambda v=version: target.update(v), lambda v=version: draft.update(10 + v))
            assert target.holds(version) and draft.holds(10 + version)
        for job in (target, draft):
            assert (sent(job.senders), sent(job.receivers)) == (2 * COPY_NBYTES, 4 * COPY_NBYTES)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@virtual
async def test_rings_of_any_size_do_not_deadlock(mode: str, num_slots: int, tmp_path: Path) -> None:
    async with exchanging(tmp_path, mode, num_slots=num_slots, relay_patience_s=60.0) as job:
        for version in (1, 2, 3):
            await job.update(version)
            assert job.holds(version)
        assert sent(job.senders) == 3 * COPY_NBYTES  # nobody lost patience


@virtual
async def test_without_relays_trainers_serve_everybody(tmp_path: Path) -> None:
    async with exchanging(tmp_path, "sync", relays="off") as job:
        await job.update(1)
        assert job.holds(1)
        assert (sent(job.senders), sent(job.receivers)) == (3 * COPY_NBYTES, 0)


@virtual
async def test_relays_that_would_be_slower_are_not_planned(tmp_path: Path) -> None:
    slow = tuple(f"{engine}=0.1/10" for engine in THREE)
    async with exchanging(tmp_path, "sync", topology=("trainers=10", *slow)) as job:
        await job.update(1)
        assert (sent(job.senders), sent(job.receivers)) == (3 * COPY_NBYTES, 0)


@virtual
async def test_c58_an_engine_that_is_not_granted_passes_nothing_on(tmp_path: Path) -> None:
    """Routes come from those that take the version, so nobody waits for the others, and one copy is sent."""
    async with exchanging(tmp_path, "receiver_overlap", relay_patience_s=0.3) as job:
        await job.update(1)
        for version in (2, 3):  # engine 2 has room for the first of them, and takes no more after it
            await gather(lambda v=version: job.send(v), lambda: job.take(0, 1))
        assert all(job.rollouts[i].holds(3) for i in (0, 1)) and job.rollouts[2].holds(1)
        assert sent(job.senders) == 3 * COPY_NBYTES


@virtual
async def test_c42_what_a_relay_has_not_found_right_is_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's bytes reach one engine damaged: it gives up, and the others have the version."""
    async with exchanging(tmp_path, "receiver_overlap", num_trainers=1, relay_patience_s=60.0) as job:
        await job.update(1)
        copy = LoopbackEndpoint._copy
        spoilt: list[str] = []

        async def spoil(endpoint: LoopbackEndpoint, target: memoryview, source: memoryview) -> None:
            await copy(endpoint, target, source)
            from_trainer = endpoint._owner.name.startswith("trainer")
            if from_trainer and endpoint.peer == "rollout/engine-1[0]" and not spoilt:
                spoilt.append(endpoint.peer)
                target[0] ^= 1

        monkeypatch.setattr(LoopbackEndpoint, "_copy", spoil)
        deliveries, _ = await gather(lambda: job.send(2), lambda: job.take(0, 2))
        assert spoilt
        outcomes = await deliveries[0].applied()  # type: ignore[attr-defined]  # a list of each kind
        assert outcomes == {"engine-0": "applied", "engine-1": "aborted", "engine-2": "applied"}
        assert job.rollouts[0].holds(2) and job.rollouts[1].holds(1) and job.rollouts[2].holds(2)
        await job.update(3)
        assert job.holds(3)


@virtual
async def test_bytes_that_a_relay_damages_are_taken_from_the_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with exchanging(tmp_path, "receiver_overlap", num_trainers=1, relay_patience_s=60.0) as job:
        await job.update(1)
        copy = RelayStaging.copy
        spoilt: list[int] = []

        def spoil(staging: RelayStaging, place: Place, kept: memoryview) -> Event:
            event = copy(staging, place, kept)
            event.synchronize()
            place.buffer.view[place.offset] ^= 1
            spoilt.append(kept.nbytes)
            return event

        monkeypatch.setattr(RelayStaging, "copy", spoil)
        await job.update(2)
        assert job.holds(2) and spoilt


@contextmanager
def damaging(
    monkeypatch: pytest.MonkeyPatch, job: Job, *, until: Callable[[], bool], prompt: int
) -> Iterator[list[str]]:
    """Engine 1 damages what it passes on to engine 0, all but the first few with bytes that land only when
    `until()`, whatever becomes of the put; gives what has landed."""
    copy = LoopbackEndpoint._copy
    landed: list[str] = []
    begun: list[str] = []

    async def spoil(endpoint: LoopbackEndpoint, target: memoryview, source: memoryview) -> None:
        if (endpoint._owner.name, endpoint.peer) != ("rollout/engine-1[0]", "rollout/engine-0[0]"):
            return await copy(endpoint, target, source)
        is_prompt = len(begun) < prompt
        begun.append(endpoint.peer)
        with anyio.CancelScope(shield=True):
            while not (len(begun) > prompt if is_prompt else until()):
                await anyio.sleep(0.001)
            await copy(endpoint, target, source)
        target[0] ^= 1
        landed.append(endpoint.peer)

    with monkeypatch.context() as patch:
        patch.setattr(LoopbackEndpoint, "_copy", spoil)
        yield landed


@virtual
async def test_trainers_take_over_when_a_relay_that_damages_bytes_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it still writes is wrong too, and would come last."""
    pair = {"engine-0": 1, "engine-1": 1}
    values = {"num_trainers": 1, "engines": pair, "relay_patience_s": 60.0, "slot_nbytes": 512}
    async with exchanging(tmp_path, "receiver_overlap", **values) as job:
        await job.update(1)
        ring, member = engine_of(job, 0)._ring, member_of(job, 0)

        def is_found_out() -> bool:
            return bool(member._distrusted) or "filling" not in ring.states

        with damaging(monkeypatch, job, until=is_found_out, prompt=1) as landed:

            async def take() -> list[wbridge.Update]:
                await job.take(1)
                while len(landed) < 2 or "filling" in ring.states:
                    await anyio.sleep(0.001)
                return await job.take(0)

            await gather(lambda: job.send(2), take)
        assert job.holds(2)


@pytest.mark.parametrize("prompt", [0, 1])
@virtual
async def test_a_version_that_a_relay_may_still_damage_is_given_up(
    prompt: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is bypassed since it is silent, and brings wrong bytes before it hears that; or it falls silent
    after such bytes."""
    pair = {"engine-0": 1, "engine-1": 1}
    values = {"num_trainers": 1, "engines": pair, "relay_patience_s": 0.2, "slot_nbytes": 512}
    async with exchanging(tmp_path, "receiver_overlap", **values) as job:
        await job.update(1)
        holding_back(monkeypatch, job, 1, swallows=False)
        if not prompt:
            monkeypatch.setattr(member_of(job, 1).relay, "drop", lambda *_: None)
        engine = engine_of(job, 0)

        def is_through() -> bool:
            return 2 in engine._aborted or "filling" not in engine._ring.states

        with damaging(monkeypatch, job, until=is_through, prompt=prompt):
            deliveries, _ = await gather(lambda: job.send(2), lambda: job.take(1))
            outcomes = await deliveries[0].applied()  # type: ignore[attr-defined]  # a list of each kind
        assert outcomes == {"engine-0": "aborted", "engine-1": "applied"}
        assert job.rollouts[0].holds(1) and job.rollouts[1].holds(2)
        await job.update(3)
        assert job.holds(3)


@virtual
async def test_what_a_bypassed_relay_damages_after_the_last_check_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its put is cut, so nobody is told that it has come; it has stopped by the time of the apply."""
    pair = {"engine-0": 1, "engine-1": 1}
    values = {"num_trainers": 1, "engines": pair, "relay_patience_s": 0.2, "slot_nbytes": 512}
    async with exchanging(tmp_path, "receiver_overlap", **values) as job:
        await job.update(1)
        holding_back(monkeypatch, job, 1, swallows=False)
        ring, copy = engine_of(job, 0)._ring, LoopbackEndpoint._copy
        landed: list[str] = []

        async def spoil(endpoint: LoopbackEndpoint, target: memoryview, source: memoryview) -> None:
            if (endpoint._owner.name, endpoint.peer) != ("rollout/engine-1[0]", "rollout/engine-0[0]"):
                return await copy(endpoint, target, source)
            with anyio.CancelScope(shield=True):
                while "filling" in ring.states:
                    await anyio.sleep(0.001)
            target[0] ^= 1
            landed.append(endpoint.peer)
            await anyio.lowlevel.checkpoint_if_cancelled()

        async def fail() -> None:
            await job.take(1)
            while not landed or any(slot.may_write for slot in ring._slots):
                await anyio.sleep(0.001)
            with pytest.raises(UpdateAborted, match="until a whole version lands"):
                await job.receivers[0].poll_requests(wait_s=10.0)

        with monkeypatch.context() as patch:
            patch.setattr(LoopbackEndpoint, "_copy", spoil)
            deliveries, _ = await gather(lambda: job.send(2), fail)
        assert await deliveries[0].applied() == {"engine-0": "tainted", "engine-1": "applied"}  # type: ignore[attr-defined]  # a list
        assert job.receivers[0].version is None and job.rollouts[1].holds(2)
        await job.update(3)
        assert job.holds(3)


@pytest.mark.parametrize("mode", ["receiver_overlap", "async"])
@virtual
async def test_an_engine_that_does_not_poll_holds_up_no_other_even_with_small_rings(
    mode: str, tmp_path: Path
) -> None:
    """It is alive, but as long as its application does not poll it has nothing to pass on."""
    values = {"num_slots": 2, "slot_nbytes": 512, "relay_patience_s": 0.2}
    async with exchanging(tmp_path, mode, **values) as job:
        await job.update(1)

        async def take() -> list[wbridge.Update]:
            await job.take(0, 2)
            assert job.rollouts[0].holds(2) and job.rollouts[1].holds(1) and job.rollouts[2].holds(2)
            return await job.take(1)

        await gather(lambda: job.send(2), take)
        assert job.holds(2)


def holding_back(
    monkeypatch: pytest.MonkeyPatch, job: Job, index: int, *, swallows: bool = True
) -> list[str]:
    """From now on this worker gives no sign, and if it `swallows` credits, passes nothing on, as if it had
    been stopped."""
    muted: list[str] = []
    relay, member = member_of(job, index).relay, member_of(job, index)

    def swallow(receiver: str, credit: Credit) -> None:
        muted.append(receiver)

    if swallows:
        monkeypatch.setattr(relay, "credit", swallow)
    tell = member._tell
    monkeypatch.setattr(
        member, "_tell", lambda to, message: None if isinstance(message, Alive) else tell(to, message)
    )
    return muted


@pytest.mark.parametrize("mode", MODES)
@virtual
async def test_a_silent_relay_is_bypassed(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers bring what it owes, and only that; it gets the version itself."""
    async with exchanging(tmp_path, mode, relay_patience_s=1.0) as job:
        await job.update(1)
        before = sent(job.senders)
        muted = holding_back(monkeypatch, job, 1)
        await job.update(2)
        assert job.holds(2) and muted
        kept = [g for g in engine_of(job, 1)._groups if g.index not in member_of(job, 1)._sources]
        owed = sum(piece.nbytes for group in kept for piece in group.pieces)
        assert sent(job.senders) - before == COPY_NBYTES + 2 * owed


@virtual
async def test_a_relay_that_gives_signs_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece takes longer than patience lasts, and nobody is bypassed: trainers send one copy."""
    async with exchanging(tmp_path, "sync", num_trainers=1, relay_patience_s=0.2) as job:
        await job.update(1)
        copy, slow = LoopbackEndpoint._copy, []

        async def copy_slowly(endpoint: LoopbackEndpoint, target: memoryview, source: memoryview) -> None:
            if endpoint.peer.startswith("rollout") and len(slow) < 4:
                slow.append(endpoint.peer)
                await anyio.sleep(0.5)
            await copy(endpoint, target, source)

        monkeypatch.setattr(LoopbackEndpoint, "_copy", copy_slowly)
        await job.update(2)
        assert job.holds(2) and len(slow) == 4
        assert sent(job.senders) == 2 * COPY_NBYTES


@pytest.mark.parametrize("mode", ["sender_overlap", "async"])
@pytest.mark.parametrize("put_s", [0.1, 1.0])
@virtual
async def test_engines_that_poll_at_different_times_share_one_copy_on_a_slow_link(
    mode: str, put_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer faster than the link: there is always a newer version for who is ready first."""
    last = 40
    monkeypatch.setattr("tests.unit.session.exchange.PATIENCE_S", 600.0)
    async with exchanging(tmp_path, mode, num_trainers=1) as job:
        copy = LoopbackEndpoint._copy
        applied: list[list[int]] = [[] for _ in THREE]

        async def copy_slowly(endpoint: LoopbackEndpoint, target: memoryview, source: memoryview) -> None:
            await anyio.sleep(put_s)
            await copy(endpoint, target, source)

        async def roll(index: int) -> None:
            while job.receivers[index].version != last:
                await anyio.sleep(0.02 + 0.03 * index)
                if update := await job.receivers[index].poll_requests():
                    applied[index].append(update.version)

        async def send() -> None:
            for version in range(1, last + 1):
                await job.send(version)
                await anyio.sleep(put_s / 2)

        monkeypatch.setattr(LoopbackEndpoint, "_copy", copy_slowly)
        await gather(*[lambda k=k: roll(k) for k in range(3)], send)  # type: ignore[misc]  # a lambda with a default
        assert job.holds(last)
        assert applied[0] == applied[1] == applied[2] and len(applied[0]) < last
        assert sent(job.senders) == len(applied[0]) * COPY_NBYTES


@virtual
async def test_patience_that_a_stall_has_lengthened_gets_short_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with exchanging(tmp_path, "sync", num_trainers=1, relay_patience_s=0.2) as job:
        await job.update(1)
        copy, slow = LoopbackEndpoint._copy, list[str]()

        async def stall(endpoint: LoopbackEndpoint, target: memoryview, source: memoryview) -> None:
            if endpoint._owner.name == "rollout/engine-1[0]" and not slow:
                slow.append(endpoint.peer)
                await anyio.sleep(0.3)
            await copy(endpoint, target, source)

        with monkeypatch.context() as patch:
            patch.setattr(LoopbackEndpoint, "_copy", stall)
            await job.update(2)
        member = next(m for m in (member_of(job, k) for k in (0, 2)) if f"{m._worker}" == slow[0])
        lengthened_s = member._longest_s["rollout/engine-1[0]"]
        assert lengthened_s > 0.04  # a quarter of its patience: the beat of the signs
        for version in range(3, 9):
            await job.update(version)
        assert member._longest_s["rollout/engine-1[0]"] < lengthened_s / 2
        assert job.holds(8) and sent(job.senders) == 8 * COPY_NBYTES


@pytest.mark.parametrize("mode", ["sync", "receiver_overlap"])
@virtual
async def test_a_receiver_that_hangs_costs_its_relays_nothing(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives no credits. The others have the version all the same, in rings of one slot, and so has it when
    it goes on: what its relays have dropped comes from the trainers."""
    async with exchanging(tmp_path, mode, num_slots=1, relay_patience_s=0.2) as job:
        await job.update(1)
        engine = engine_of(job, 2)
        give, held = engine._give_credit, list[GiveCredit]()
        monkeypatch.setattr(engine, "_give_credit", held.append)

        async def go_on() -> None:
            while not all(job.receivers[k].version == 2 for k in (0, 1)):
                await anyio.sleep(0.001)
            assert held and job.receivers[2].version == 1
            monkeypatch.undo()

            async def give_all() -> None:
                for credit in held:
                    give(credit)

            job.receivers[2]._rollout._worker.loop.submit(give_all)

        await gather(lambda: job.send(2), lambda: job.take(), go_on)
        assert job.holds(2)
        await job.update(3)
        assert job.holds(3)


@virtual
async def test_c60_an_engine_that_joins_while_versions_move_is_in_all_routes_or_in_none(
    tmp_path: Path,
) -> None:
    """Everybody finds the routes in the plan of one epoch and the engines of one grant."""
    last = 8
    async with exchanging(tmp_path, "async") as job:
        rollout = toys(1, {"engine-3": 1})[1][0]
        config = settings("async", len(THREE)) | {"host": "engine-3"}
        late = wbridge.ReceiverAdapter(
            rollout.target, rendezvous=rendezvous(tmp_path), config=config, device=LoopDevice()
        )
        job.rollouts.append(rollout)
        job.receivers.append(late)
        routed: list[int] = []

        async def roll(index: int) -> None:
            while job.receivers[index].version != last:
                if update := await job.receivers[index].poll_requests(wait_s=0.05):
                    assert job.rollouts[index].holds(update.version)

        async def join() -> None:
            await late.connect()
            await roll(3)

        async def send() -> None:
            version = 0
            while version < last:
                is_joined = late.epoch is not None
                version = min(version + 1, last if is_joined else last - 1)
                outcomes: dict[str, str] = {}
                try:
                    deliveries = await job.send(version)
                    outcomes = dict(await deliveries[0].applied())
                except* UpdateAborted:  # the epoch ended
                    pass
                if not outcomes or (version == last and set(outcomes.values()) != {"applied"}):
                    version -= 1
            routed.append(len(member_of(job, 3)._exchanges[0].members))

        async with late:
            await gather(*[lambda k=k: roll(k) for k in range(3)], join, send)
            assert routed == [4] and job.holds(last)
