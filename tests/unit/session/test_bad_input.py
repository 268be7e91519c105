"""Wrong input: each a specific error that names what is wrong, and changes nothing."""

from __future__ import annotations

import pickle  # noqa: TID251  # as the attacker, to show that nobody reads it
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import anyio
import msgspec
import pytest
import torch

import wbridge
from tests.models.toy import Rollout, Trainer, specs
from tests.unit.session.job import MODES, PATIENCE_S, gather, rendezvous, running, settings
from wbridge.control.rendezvous import FileRendezvous, look_up
from wbridge.errors import (
    AuthenticationError,
    BarrierTimeout,
    ConfigError,
    CoverageError,
    LayoutError,
    PlanError,
    ProtocolError,
    UpdateAborted,
    WBridgeError,
)
from wbridge.layout.source_map import TensorSpec

pytestmark = pytest.mark.anyio
ONE = {"engine-0": 1}


async def refusals(
    path: Path,
    sources: Sequence[wbridge.Source],
    targets: Sequence[wbridge.Target],
    *,
    config: Mapping[str, object] | None = None,
    secrets: Mapping[str, str] | None = None,
    ours: Callable[[wbridge.WorkerId], Mapping[str, object]] = lambda worker: {},
    until: type[WBridgeError] | None = None,
) -> dict[str, WBridgeError]:
    """Connect everybody at once; return the error of each worker that is refused within its time.

    With `until`, the first such error ends it: nobody waits for those that were refused.
    """
    values = settings("sync", 1) | dict(config or {})
    errors: dict[str, WBridgeError] = {}

    async def connect(adapter: wbridge.SenderAdapter | wbridge.ReceiverAdapter, worker: str) -> None:
        try:
            await adapter.connect()
        except WBridgeError as exc:
            errors.setdefault(worker, exc)
            if until is not None and isinstance(exc, until):
                waiting.cancel()

    def keywords(worker: wbridge.WorkerId) -> dict[str, object]:
        mine = values | dict(ours(worker))
        return {"rendezvous": rendezvous(path), "config": mine, "secret": (secrets or {}).get(str(worker))}

    adapters = [(wbridge.SenderAdapter(s, **keywords(s.worker)), str(s.worker)) for s in sources]  # type: ignore[arg-type]  # a test's own mapping
    adapters += [(wbridge.ReceiverAdapter(t, **keywords(t.worker)), str(t.worker)) for t in targets]  # type: ignore[arg-type, misc]  # as above
    waiting = anyio.CancelScope()
    try:
        with anyio.fail_after(PATIENCE_S), waiting:
            await gather(*[lambda a=a, w=w: connect(a, w) for a, w in adapters])
    finally:
        await gather(*[adapter.aclose for adapter, _ in adapters])
    return errors


def renamed(source: wbridge.Source, old: str, new: str) -> wbridge.Source:
    """The same trainer, with one checkpoint tensor under another name."""
    load = source.load_weights
    assert load is not None

    def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        load((old if name == new else name, tensor) for name, tensor in tensors)

    checkpoint = {new if name == old else name: spec for name, spec in source.checkpoint.items()}
    return msgspec.structs.replace(source, checkpoint=checkpoint, load_weights=load_weights)


async def test_unmatched_names_are_named(tmp_path: Path) -> None:
    source = renamed(Trainer().source, "norm.weight", "model.norm.weight")
    errors = await refusals(tmp_path, [source], [Rollout().target])
    assert sorted(errors) == ["rollout/engine-0[0]", "trainer/trainer[0]"]
    for error in errors.values():
        assert isinstance(error, PlanError)
        assert "no trainer has 1 of the 9 tensors that rollouts need: 'norm.weight'" in str(error)
        assert "'model.norm.weight'" in str(error) and "rollout/engine-0[0]" in str(error)


async def test_a_shape_mismatch_names_the_tensor_and_both_shapes(tmp_path: Path) -> None:
    wrong = specs() | {"norm.weight": TensorSpec((17,), "float32")}
    trainer = Trainer()
    trainer.parameters["norm.weight"] = torch.zeros(17)
    source = msgspec.structs.replace(trainer.source, checkpoint=wrong)
    errors = await refusals(tmp_path, [source], [Rollout().target])
    assert set(errors) == {"rollout/engine-0[0]", "trainer/trainer[0]"}
    for error in errors.values():
        assert isinstance(error, LayoutError)
        assert all(text in str(error) for text in ("norm.weight", "17", "16"))


async def test_integers_are_not_cast_to_floats(tmp_path: Path) -> None:
    trainer = Trainer(dtype=torch.int32)
    errors = await refusals(tmp_path, [trainer.source], [Rollout().target])
    assert errors
    for error in errors.values():
        assert isinstance(error, LayoutError)
        assert "int32" in str(error) and "float32" in str(error)


async def test_elements_that_nothing_feeds_are_named(tmp_path: Path) -> None:
    target = Rollout().target
    target = msgspec.structs.replace(target, parameters={**target.parameters, "router.bias": torch.zeros(4)})
    errors = await refusals(tmp_path, [Trainer().source], [target], config={"connect_timeout_s": 0.5})
    error = errors["rollout/engine-0[0]"]
    assert isinstance(error, CoverageError)
    assert "router.bias" in str(error) and "allow_unfed" in str(error)
    assert isinstance(errors["trainer/trainer[0]"], BarrierTimeout)


async def test_a_trainer_that_holds_too_little_is_named(tmp_path: Path) -> None:
    """Only rank 0's rows: the second trainer rank describes the same shard."""
    half = msgspec.structs.replace(
        Trainer(0, 2).source, worker=wbridge.WorkerId("trainer", "trainer", (1,), (0,))
    )
    errors = await refusals(tmp_path, [half], [Rollout().target])
    assert set(errors) == {"rollout/engine-0[0]", "trainer/trainer[0]"}
    for error in errors.values():
        assert isinstance(error, CoverageError)
        assert "no trainer" in str(error) or "holds" in str(error)


async def test_a_wrong_secret_is_refused(tmp_path: Path) -> None:
    errors = await refusals(
        tmp_path,
        [Trainer().source],
        [Rollout().target],
        secrets={"trainer/trainer[0]": "right", "rollout/engine-0[0]": "wrong"},
        config={"connect_timeout_s": 1.0},
    )
    assert isinstance(errors["rollout/engine-0[0]"], AuthenticationError)
    late = errors["trainer/trainer[0]"]
    assert isinstance(late, BarrierTimeout)
    assert "right" not in str(errors) and "wrong" not in str(errors)


async def test_two_modes_in_one_job_are_refused_with_both_origins(tmp_path: Path) -> None:
    errors = await refusals(
        tmp_path,
        [Trainer().source],
        [Rollout().target],
        ours=lambda worker: {"mode": "async"} if worker.role == "rollout" else {},
        until=ConfigError,
    )
    error = errors["rollout/engine-0[0]"]
    assert isinstance(error, ConfigError)
    text = "sets mode = 'async' (argument), but the job uses 'sync' (argument of the coordinator)"
    assert text in str(error)


@pytest.mark.parametrize(("trainer_s", "rollout_s"), [(1.0, 0.5), (0.5, PATIENCE_S)])
async def test_a_peer_that_never_comes_is_named_by_its_coordinate(
    trainer_s: float, rollout_s: float, tmp_path: Path
) -> None:
    """Also when the trainer that runs the coordinator gives up first."""
    errors = await refusals(
        tmp_path,
        [Trainer(0, 2).source],
        [Rollout("engine-0", 1, 2).target],
        ours=lambda worker: {"connect_timeout_s": trainer_s if worker.role == "trainer" else rollout_s},
    )
    assert set(errors) == {"rollout/engine-0[1]", "trainer/trainer[0]"}
    for error in errors.values():
        assert isinstance(error, BarrierTimeout)
    missing = {name for error in errors.values() for name in error.missing}  # type: ignore[attr-defined]
    assert {"trainer/trainer[1]", "rollout/engine-0[0]"} <= missing


async def test_ranks_that_send_different_versions_are_told_so(tmp_path: Path) -> None:
    async with running(tmp_path, "sync", engines=ONE) as job:

        async def send(rank: int, version: int) -> None:
            with pytest.raises(ProtocolError, match="rank 0 sends version 1, rank 1 sends version 2"):
                await job.senders[rank].send_weights(version)

        await gather(lambda: send(0, 1), lambda: send(1, 2))
        assert job.receivers[0].version is None
        await job.update(3)
        assert job.holds(3)


async def test_metadata_that_cannot_travel_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async with running(tmp_path, "sync", num_trainers=1, engines=ONE) as job:
        with pytest.raises(ConfigError, match=r"metadata takes 70\d+ bytes, at most 65536"):
            await job.senders[0].send_weights(1, {"text": "x" * 70_000})
        with pytest.raises(ConfigError, match="metadata cannot be sent"):
            await job.senders[0].send_weights(1, {"object": object()})
        _, updates = await job.update(1, {"text": "x" * 60_000})
        assert updates[0].metadata == {"text": "x" * 60_000}


@pytest.mark.parametrize("case", ["c33_replaced", "c34_repacked", "c35_moved"])
async def test_c33_c34_c35_a_destination_that_moved_is_refused(case: str, tmp_path: Path) -> None:
    """The engine stays on its old version, nothing is written to dead memory, and the poll says why."""
    released: list[object] = []

    class Hooks:
        def before_apply(self) -> None:
            return

        def after_apply(self, update: wbridge.Update | None) -> None:
            if update is None:
                released.append(update)

    engines = {"engine-0": 2}
    async with running(tmp_path, "async", engines=engines, hooks={0: Hooks()}, hold_timeout_s=0.2) as job:
        await job.update(1)
        parameters = job.rollouts[1].parameters
        old = parameters["qkv"]
        before = {name: tensor.clone() for name, tensor in parameters.items()}
        if case == "c33_replaced":
            parameters["qkv"] = old.clone()
        elif case == "c34_repacked":
            parameters["qkv"] = old.to(torch.float64)
        else:
            parameters["qkv"] = old.clone().t().contiguous().t()
        delivery = (await job.send(2))[0]
        await delivery.landed()

        async def refuse() -> None:
            with pytest.raises(LayoutError, match="qkv"):
                await job.receivers[1].poll_requests(wait_s=PATIENCE_S)

        async def let_go() -> None:
            while not released:
                await anyio.sleep(0.001)
                assert await job.receivers[0].poll_requests() is None

        await gather(refuse, let_go)
        assert [receiver.version for receiver in job.receivers] == [1, 1]
        assert torch.equal(old, before["qkv"])
        assert job.rollouts[0].holds(1)

        parameters["qkv"] = old
        await job.take()
        assert job.holds(2)


@pytest.mark.parametrize("mode", ["sync", "sender_overlap"])
async def test_a_direct_ring_may_be_as_small_as_one_slot(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode, engines=ONE, num_slots=1) as job:
        for version in (1, 2):
            await job.update(version)
            assert job.holds(version)


async def test_an_identity_taken_by_another_adapter_of_this_process_is_refused(tmp_path: Path) -> None:
    targets = [
        Rollout("engine-0", 0, 2).target,
        Rollout("engine-0", 1, 2).target,
        Rollout("engine-0", 1, 2).target,
    ]
    errors = await refusals(tmp_path, [Trainer().source], targets, until=ConfigError)
    error = errors["rollout/engine-0[1]"]
    assert isinstance(error, ConfigError)
    assert "claimed twice" in str(error) and "own group and mesh coordinate" in str(error)


class Bomb:
    """Unpickling this would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


async def test_c70_a_pickle_sent_to_the_coordinator_is_never_read(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines={"engine-0": 2}) as job:
        meeting = look_up(FileRendezvous(str(tmp_path / "rendezvous")), b"")
        host, _, port = meeting.address.rpartition(":")
        lockstep = job.receivers[0]._rollout._lockstep._link
        assert lockstep is not None
        payload = pickle.dumps(Bomb(tmp_path / "exploded"))
        for framed in (payload, len(payload).to_bytes(4, "big") + payload):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.settimeout(PATIENCE_S)
                stranger.sendall(framed)
                stranger.shutdown(socket.SHUT_WR)
                while await anyio.to_thread.run_sync(stranger.recv, 4096):
                    pass
        assert host == "127.0.0.1"
        assert not (tmp_path / "exploded").exists()
        await job.update(1)  # and the job goes on
        assert job.holds(1)


async def test_a_version_that_was_refused_can_be_sent_again(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines=ONE) as job:
        first = (await job.send(1))[0]
        await first.landed()
        await first.abort()
        with pytest.raises(UpdateAborted, match=r"version 1"):
            await first.applied()
        await job.update(1)
        assert job.holds(1)


WRONG_DESCRIPTIONS: Mapping[str, Callable[[], object]] = {
    "no tuple of integers": lambda: wbridge.WorkerId("rollout", "e", 2, 0),  # type: ignore[arg-type]  # as users do
    "mesh_shape [2]": lambda: wbridge.WorkerId("rollout", "e", [2], (0,)),  # type: ignore[arg-type]  # as above
    "role is trainer or rollout": lambda: wbridge.WorkerId("learner", "e", (1,), (0,)),  # type: ignore[arg-type]  # as above
    "such as a dict": lambda: described(parameters=iter(())),
    "checkpoint is a list": lambda: described(checkpoint=["w"]),
    "'w': it is a Size": lambda: described(checkpoint={"w": torch.Size([1])}),
    "'w': shape [2, 3] is no tuple": lambda: described(checkpoint={"w": TensorSpec([2, 3], "int8")}),  # type: ignore[arg-type]  # as above
    "'w': dtype 'torch.int8'": lambda: described(checkpoint={"w": TensorSpec((2,), "torch.int8")}),
    "'w': dtype torch.int8": lambda: described(checkpoint={"w": TensorSpec((2,), torch.int8)}),  # type: ignore[arg-type]  # as above
    "takes a wbridge.Source": lambda: wbridge.SenderAdapter(Rollout().target),  # type: ignore[arg-type]  # as above
    "takes a wbridge.Target": lambda: wbridge.ReceiverAdapter(Trainer().source),  # type: ignore[arg-type]  # as above
    "config is 'async'": lambda: wbridge.SenderAdapter(Trainer().source, config="async"),  # type: ignore[arg-type]  # as above
    "one of sync, sender_overlap": lambda: wbridge.SenderAdapter(Trainer().source, config={"mode": "a"}),
}


def described(**wrong: object) -> wbridge.Target:
    return msgspec.structs.replace(Rollout().target, **wrong)  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize("text", WRONG_DESCRIPTIONS)
def test_what_describes_a_worker_is_checked_where_it_is_given(text: str) -> None:
    with pytest.raises((ConfigError, LayoutError), match=re.escape(text)):
        WRONG_DESCRIPTIONS[text]()


async def test_a_version_that_is_no_number_of_64_bits_ends_the_call_alone(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        for version in (1.5, "1", None, 2**64, -(2**63) - 1):
            with pytest.raises(ConfigError, match="version"):
                await job.senders[0].send_weights(version)  # type: ignore[arg-type]  # what is tried
        for version in (2**64 - 1, -(2**63)):
            await job.senders[0].send_weights(version)
            assert [update.version for update in await job.take()] == [version]


@pytest.mark.parametrize("mode", MODES)
async def test_a_source_that_moved_is_not_read_and_reconfigure_finds_it(mode: str, tmp_path: Path) -> None:
    """The old memory would be sent for good, and no engine would notice."""
    async with running(tmp_path, mode, engines=ONE) as job:
        await job.update(1)
        name, tensor = next(iter(job.trainers[1].parameters.items()))
        job.trainers[1].parameters[name] = tensor.clone()
        errors: dict[int, WBridgeError] = {}

        async def send(rank: int) -> None:
            with pytest.raises(WBridgeError) as caught:
                await (await job.senders[rank].send_weights(2)).applied()
            errors[rank] = caught.value

        await gather(lambda: send(0), lambda: send(1))
        assert isinstance(errors[0], UpdateAborted)
        assert isinstance(errors[1], LayoutError)
        assert all(
            text in str(errors[1]) for text in (name, "trainer/trainer[1]", "version 2", "reconfigure")
        )
        polling = anyio.CancelScope()

        async def poll() -> None:
            with polling:
                while True:
                    await job.receivers[0].poll_requests(wait_s=0.01)

        async def reconfigure() -> None:
            await gather(*[lambda s=s: s.reconfigure(mode=mode) for s in job.senders])
            polling.cancel()

        await gather(poll, reconfigure)
        await job.update(3)
        assert job.holds(3)
