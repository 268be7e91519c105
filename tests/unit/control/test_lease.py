from __future__ import annotations

import asyncio
import itertools
import os
import select
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.abc
import pytest

from wbridge.control import codec
from wbridge.control import lease as lease_module
from wbridge.control.connection import Connection
from wbridge.control.lease import LeasedConnection
from wbridge.control.messages import Bye, EpochReady, Heartbeat, Join, Message, Rejected
from wbridge.control.tcp import connect_tcp, serve_tcp
from wbridge.errors import ConfigError, EndpointClosed, PeerLost
from wbridge.ids import Epoch
from wbridge.testing.clock import VirtualTimeLoop, run_virtual

pytestmark = pytest.mark.anyio
IDLE_S = 1000.0
"""A heartbeat that never matters in a test."""


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Connection, Connection]]:
    """Both ends of one connection; the test owns them."""
    handed, ends = anyio.create_memory_object_stream[Connection](1)

    async def hand_over(peer: Connection) -> None:
        await handed.send(peer)
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks, handed, ends:
        address = await tasks.start(partial(serve_tcp, hand_over, secret=b""))
        async with await connect_tcp(address, secret=b"") as near:
            yield near, await ends.receive()
        tasks.cancel_scope.cancel()


async def test_posts_arrive_in_order_and_finish_sends_them_all() -> None:
    async with pair() as (near, far), anyio.create_task_group() as tasks:
        lease = LeasedConnection(near, IDLE_S)
        tasks.start_soon(lease.run)
        messages = [EpochReady(Epoch(1, n)) for n in range(50)]
        for message in messages:
            lease.post(message)
        lease.finish()
        lease.post(Bye())

        assert [await far.receive() for _ in messages] == messages
        await far.aclose()
        with pytest.raises(PeerLost):
            await lease.receive()


async def test_a_post_is_on_its_way_when_it_returns() -> None:
    """Without a turn of the loop, and whether `run` has begun or not."""
    async with pair() as (near, far), LeasedConnection(near, IDLE_S) as lease:
        for message in (Bye(), Heartbeat()):
            lease.post(message)
            assert os.read(descriptor_of(far), 100) == codec.encode(message)


async def test_posts_beyond_what_the_socket_holds_arrive_whole_and_in_order() -> None:
    """Frames that are written at once, cut short, queued, and too large to be tried."""
    messages: list[Message] = [
        Join(bytes([n]) * (lease_module.MAX_NOW_NBYTES - 500), b"") for n in range(250)
    ]
    messages[100:100] = [Join(b"x" * 2**20, b"")]
    async with pair() as (near, far), anyio.create_task_group() as tasks:
        lease = LeasedConnection(near, IDLE_S)
        tasks.start_soon(lease.run)
        for message in messages:
            lease.post(message)
        assert [await far.receive() for _ in messages] == messages
        lease.post(Bye())
        assert await far.receive() == Bye()
        lease.abort("over")


async def test_leaving_the_context_closes_a_connection_that_was_never_run() -> None:
    async with pair() as (near, far):
        async with LeasedConnection(near, IDLE_S):
            pass
        with pytest.raises(PeerLost):
            await far.receive()


async def test_an_idle_side_renews_the_lease_and_heartbeats_are_invisible() -> None:
    async with pair() as (near, far), anyio.create_task_group() as tasks:
        lease = LeasedConnection(near, 0.01)
        tasks.start_soon(lease.run)
        assert [await far.receive() for _ in range(2)] == [Heartbeat(), Heartbeat()]

        await far.send(Heartbeat())
        await far.send(Bye())
        assert await lease.receive() == Bye()
        lease.abort("over")


async def test_a_silent_peer_is_lost_after_three_heartbeats() -> None:
    async with pair() as (near, _), anyio.create_task_group() as tasks:
        lease = LeasedConnection(near, 0.01)
        tasks.start_soon(lease.run)
        with pytest.raises(PeerLost, match=r"silent for 0\.03 s, 3 heartbeats"):
            await lease.receive()
        lease.finish()


def descriptor_of(connection: Connection) -> int:
    return connection._stream.extra(anyio.abc.SocketAttribute.raw_socket).fileno()


class Pauses:
    """A process that does not run for a while, in which its peer goes on."""

    def __init__(self, near: Connection, far: Connection) -> None:
        self._near, self._far = descriptor_of(near), descriptor_of(far)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self._loop = loop

    def pass_by(self, pause_s: float, frame: bytes = b"") -> None:
        """Stand still for that time. Meanwhile `frame` comes; nothing of it has been read afterwards."""
        if frame:
            os.write(self._far, frame)
            assert select.select([self._near], [], [], 10)[0]
        self._loop.now_s += pause_s


@pytest.mark.parametrize("num_silent", [0, 1, 2])
def test_a_pause_of_this_process_is_no_silence_of_its_peer(num_silent: int) -> None:
    """What came meanwhile is unread when the timer, long overdue, fires."""

    async def main() -> None:
        async with pair() as (near, far), anyio.create_task_group() as tasks:
            lease, pauses = LeasedConnection(near, 10.0), Pauses(near, far)
            tasks.start_soon(lease.run)

            async def pause() -> None:
                await anyio.sleep(10.0 * num_silent + 5.0)
                for _ in range(10):
                    pauses.pass_by(1000.0, codec.encode(Heartbeat()))
                    await anyio.sleep(0.1)
                pauses.pass_by(1000.0, codec.encode(Bye()))

            tasks.start_soon(pause)
            assert await lease.receive() == Bye()
            lease.abort("over")

    run_virtual(main)


def test_a_long_message_over_a_slow_link_is_no_silence() -> None:
    """While it comes, no heartbeat can."""

    async def main() -> None:
        async with pair() as (near, far), anyio.create_task_group() as tasks:
            lease, message = LeasedConnection(near, 10.0), Join(b"m" * 4096, b"")
            tasks.start_soon(lease.run)

            async def trickle() -> None:
                frame = codec.encode(message)
                for start in range(0, len(frame), 512):
                    await anyio.sleep(25.0)
                    os.write(descriptor_of(far), frame[start : start + 512])

            tasks.start_soon(trickle)
            assert await lease.receive() == message
            with pytest.raises(PeerLost, match="silent for 30 s"):
                await lease.receive()
            lease.abort("over")

    run_virtual(main)


def test_a_lease_runs_out_three_heartbeats_after_the_last_message_and_not_while_its_owner_is_busy() -> None:
    async def main() -> None:
        async with pair() as (near, far), anyio.create_task_group() as tasks:
            lease = LeasedConnection(near, 10.0)
            tasks.start_soon(lease.run)
            await anyio.sleep(1000.0)  # before it is read for the first time
            for pause_s in (3.0, 28.0, 14.0):
                tasks.start_soon(send_later, far, pause_s)
                assert await lease.receive() == Bye()
            heard_s = anyio.current_time()
            with pytest.raises(PeerLost, match="silent for 30 s"):
                await lease.receive()
            assert anyio.current_time() - heard_s == pytest.approx(30.0, abs=0.1)

    async def send_later(far: Connection, pause_s: float) -> None:
        await anyio.sleep(pause_s)
        await far.send(Bye())

    run_virtual(main)


def test_a_side_that_posts_sends_no_heartbeats_and_one_that_stops_sends_one_in_time() -> None:
    async def main() -> None:
        async with pair() as (near, far), anyio.create_task_group() as tasks:
            lease = LeasedConnection(near, 10.0)
            tasks.start_soon(lease.run)
            for _ in range(5):
                await anyio.sleep(9.0)
                lease.post(Bye())
                assert await far.receive() == Bye()
            posted_s = anyio.current_time()
            assert await far.receive() == Heartbeat()
            assert anyio.current_time() - posted_s == pytest.approx(10.0, abs=0.1)
            lease.abort("over")

    run_virtual(main)


async def test_a_peer_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Posting never waits, so a stuck peer holds up nobody and costs a bounded queue."""
    monkeypatch.setattr(lease_module, "MAX_POSTED", 3)
    async with pair() as (near, _), anyio.create_task_group() as tasks:
        lease = LeasedConnection(near, IDLE_S)
        tasks.start_soon(lease.run)
        for _ in range(8):
            lease.post(Join(b"m" * 2**23, b""))
        with pytest.raises(PeerLost, match="does not read: 3 messages"):
            await lease.receive()


async def test_a_rejection_is_raised_to_the_owner() -> None:
    async with pair() as (near, far), anyio.create_task_group() as tasks:
        lease = LeasedConnection(near, IDLE_S)
        tasks.start_soon(lease.run)
        await far.send(Rejected("ConfigError", "two values"))
        with pytest.raises(ConfigError, match="two values"):
            await lease.receive()
        lease.finish()


async def test_leaving_the_context_closes_the_connection() -> None:
    async with pair() as (near, far), anyio.create_task_group() as tasks:
        async with LeasedConnection(near, IDLE_S) as lease:
            await tasks.start(lease.run)
        with pytest.raises(PeerLost):
            await far.receive()
        with pytest.raises((PeerLost, EndpointClosed)):
            await lease.receive()


async def test_cancelling_the_owner_closes_the_connection() -> None:
    async with pair() as (near, far):
        async with anyio.create_task_group() as tasks:
            await tasks.start(LeasedConnection(near, IDLE_S).run)
            tasks.cancel_scope.cancel()
        with pytest.raises(PeerLost):
            await far.receive()


def test_of_two_idle_sides_one_sends_heartbeats_and_the_other_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the other one wakes up once for both."""

    async def main() -> None:
        sent: list[list[float]] = [[], []]

        def note(times: list[float], post: Callable[[Message], None], message: Message) -> None:
            times.append(anyio.current_time())
            post(message)

        async with pair() as ends, anyio.create_task_group() as tasks:
            for end, times in zip(ends, sent, strict=True):
                lease = LeasedConnection(end, 10.0)
                monkeypatch.setattr(lease, "post", partial(note, times, lease.post))
                tasks.start_soon(lease.run)
                tasks.start_soon(lease.deliver, pytest.fail)
                await anyio.sleep(3.0)
            await anyio.sleep(200.0)
            tasks.cancel_scope.cancel()
        leading, following = sent
        assert [b - a for a, b in itertools.pairwise(leading)] == pytest.approx([10.0] * 19, abs=0.1)
        assert following == pytest.approx(leading, abs=0.1)

    run_virtual(main)
