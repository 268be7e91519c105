from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import pytest

from tests.unit.control.job import running, trainer
from wbridge.config import Config, Mode
from wbridge.control import client
from wbridge.control.agreement import adopt, check_agreement, explicit_settings, job_values
from wbridge.control.client import connect_coordinator, request_status
from wbridge.control.coordinator import Coordinator
from wbridge.control.messages import Welcome
from wbridge.control.rendezvous import FileRendezvous, Meeting, Rendezvous, TcpRendezvous, publish
from wbridge.errors import AuthenticationError, BarrierTimeout, ConfigError

pytestmark = pytest.mark.anyio


async def connect(place: Rendezvous, secret: bytes = b"", limit_s: float = 5.0) -> Welcome:
    connection, welcome = await connect_coordinator(
        place,
        trainer(),
        Config(connect_timeout_s=limit_s),
        explicit={},
        host="host",
        adapter_token="token",
        secret=secret,
    )
    await connection.aclose()
    return welcome


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_BACKOFF_S", 0.005)
    monkeypatch.setattr(client, "MAX_BACKOFF_S", 0.01)


@pytest.mark.parametrize("before", ["nothing", "dead", "stranger"])
async def test_a_rendezvous_file_is_awaited_and_a_stale_one_is_outlived(tmp_path: Path, before: str) -> None:
    """It is absent at first, or a dead coordinator's, whose port is free or another's by now."""
    place = FileRendezvous(str(tmp_path / "job"))
    welcomes: list[Welcome] = []

    async def connect_and_note() -> None:
        welcomes.append(await connect(place))

    async with running() as stranger:
        address = stranger.address
    async with running() as stranger, anyio.create_task_group() as tasks:
        if before != "nothing":
            publish(place, Meeting(address if before == "dead" else stranger.address, b"an old secret"))
        async with anyio.create_task_group() as connecting:
            connecting.start_soon(connect_and_note)
            with anyio.move_on_after(0.03):
                await anyio.sleep_forever()
            assert not welcomes
            coordinator = Coordinator(Config(), secret=b"new")
            await tasks.start(coordinator.serve)
            publish(place, Meeting(coordinator.address, b"new"))
        assert [welcome.incarnation for welcome in welcomes] == [coordinator.incarnation]
        tasks.cancel_scope.cancel()


async def test_a_file_whose_secret_stays_wrong_is_an_authentication_error(tmp_path: Path) -> None:
    place = FileRendezvous(str(tmp_path / "job"))
    async with running() as stranger:
        publish(place, Meeting(stranger.address, b"an old secret"))
        with pytest.raises(AuthenticationError):
            await connect(place, limit_s=0.05)


async def test_a_secret_given_by_the_user_is_refused_at_once(tmp_path: Path) -> None:
    place = FileRendezvous(str(tmp_path / "job"))
    async with running() as coordinator:
        publish(place, Meeting(coordinator.address, b"of the file"))
        with pytest.raises(AuthenticationError):
            await connect(place, secret=b"given", limit_s=1000)


async def test_a_listener_that_says_nothing_does_not_stop_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "HANDSHAKE_S", 0.02)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")

    async def say_nothing(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await anyio.sleep_forever()

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, say_nothing)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with pytest.raises(BarrierTimeout, match="did not answer") as caught:
            await connect(TcpRendezvous("127.0.0.1", port), limit_s=0.5)
        assert caught.value.missing == ("coordinator",)
        tasks.cancel_scope.cancel()


async def test_status_of_a_job_nobody_runs_is_a_timeout() -> None:
    async with running() as coordinator:
        host, _, port = coordinator.address.partition(":")
    with pytest.raises(BarrierTimeout, match="no coordinator"):
        await request_status(TcpRendezvous(host, int(port)), Config(connect_timeout_s=0.03))


def test_job_wide_settings_are_adopted_and_others_kept() -> None:
    job = Config(mode=Mode.ASYNC, num_engines=3, heartbeat_s=1.0, include=("a",))
    mine = Config(heartbeat_s=9.0, include=("b",))

    assert adopt(mine, job_values(job)) == Config(
        mode=Mode.ASYNC, num_engines=3, heartbeat_s=9.0, include=("b",)
    )
    with pytest.raises(ConfigError, match="num_engines"):
        adopt(mine, {"num_engines": 0})


def test_only_what_was_set_can_disagree() -> None:
    mine = Config(mode=Mode.ASYNC, num_slots=7, heartbeat_s=9.0)
    explicit = explicit_settings(
        mine, {"num_slots": "argument", "mode": "default", "heartbeat_s": "argument"}
    )
    check = partial(check_agreement, trainer(), origins={})

    assert explicit == {"num_slots": (7, "argument")}
    check(explicit, Config(num_slots=7))
    with pytest.raises(
        ConfigError, match=r"trainer/train\[0\] sets num_slots = 7 \(argument\).*uses 8 \(default"
    ):
        check(explicit, Config(num_slots=8))
    check({"a setting of a later version": (1, "argument")}, Config())
