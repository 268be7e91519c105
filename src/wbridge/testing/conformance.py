"""What every transport must do, as checks that run on any pair of transports.

A test opens a pair and runs the checks on it; a transport conforms when all of `CHECKS` pass. No check
waits on wall time, except that a lost answer ends in `TimeoutError` instead of a hang.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import permutations
from typing import Final

import anyio
import anyio.lowlevel

from wbridge.errors import EndpointClosed, PeerLost, ProtocolError
from wbridge.testing.pairs import HOST, OpenPair, Pair
from wbridge.transport.base import Endpoint, RemoteSlot, Transport

DEADLINE_S: Final = 30.0
_CLOSE_DEADLINE_S: Final = 5.0
"""Less than the time that a transport allows for closing: with a live peer it never takes that long."""
_LARGE_NBYTES: Final = 64 * 2**20
_SIZES: Final = (1, 64, 4096, 4097, 100_000, 600_000)


async def check_bytes_are_visible_before_their_notification(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()
        slots = pair.slots(_SIZES)
        for stamp in range(1, 25):
            for k, slot in enumerate(slots):
                remote = pair.receiver.expose(slot, pair.sender.name)
                source = bytes([stamp]) * len(slot)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(endpoint.put, memoryview(source), remote, bytes([k]))
                    assert await pair.receive() == bytes([k])
                    assert pair.read(slot) == source, (
                        f"slot {k} is torn or stale when its notification is here"
                    )


async def check_messages_keep_their_order(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()
        sent = [index.to_bytes(4, "little") * (1 + index * 37 % 16_000) for index in range(300)]

        async def send() -> None:
            for payload in sent:
                await endpoint.send(payload)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            assert [await pair.receive() for _ in sent] == sent


async def check_a_notification_comes_after_earlier_messages(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()
        for slot in pair.slots(_SIZES):
            nbytes = slot.nbytes
            remote = pair.receiver.expose(slot, pair.sender.name)
            await endpoint.send(b"before")
            await endpoint.put(memoryview(bytes(nbytes)), remote, b"put")
            await endpoint.send(b"after")
            assert [await pair.receive() for _ in range(3)] == [b"before", b"put", b"after"]


async def check_an_empty_put_is_legal(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()
        remote = pair.receiver.expose(pair.slots([0])[0], pair.sender.name)
        await endpoint.put(memoryview(b""), remote, b"empty")
        assert await pair.receive() == b"empty"


async def check_a_large_put(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()
        source = bytearray(b"0123456789abcdef") * (_LARGE_NBYTES // 16)
        (slot,) = pair.slots([_LARGE_NBYTES])
        remote = pair.receiver.expose(slot, pair.sender.name)
        await endpoint.put(memoryview(source), remote, b"large")
        assert await pair.receive() == b"large"
        assert pair.read(slot) == source


async def check_puts_from_a_gpu(open_pair: OpenPair) -> None:
    """Of every size, into slots of the same kind, and into the host's, as one slow writer may demand them."""
    async with open_pair() as pair:
        put = (await pair.connect()).put_from_gpu
        if put is None:
            return
        host = HOST.allocate(sum(_SIZES), "pinned")
        pair.receiver.register(host)
        for nbytes in (0, *_SIZES):
            content = bytes((7 * k + nbytes) % 251 for k in range(nbytes))
            for slot in (*pair.slots([nbytes]), host.view[:nbytes]):
                remote = pair.receiver.expose(slot, pair.sender.name)
                await put(pair.source(content), remote, b"put")
                assert await pair.receive() == b"put"
                assert (bytes(slot) if slot.obj is host.view.obj else pair.read(slot)) == content


async def check_many_outstanding_puts(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()
        slots = pair.slots(10_000 + 5_000 * (k % 40) for k in range(400))
        async with anyio.create_task_group() as tasks:
            for k, slot in enumerate(slots):
                remote = pair.receiver.expose(slot, pair.sender.name)
                source = memoryview(bytes([k % 251]) * len(slot))
                tasks.start_soon(endpoint.put, source, remote, k.to_bytes(2, "little"))
            arrived = [int.from_bytes(await pair.receive(), "little") for _ in slots]
        assert sorted(arrived) == list(range(len(slots)))
        assert all(pair.read(slot) == bytes([k % 251]) * len(slot) for k, slot in enumerate(slots))


async def check_a_cancelled_put_leaves_no_notification(open_pair: OpenPair) -> None:
    """Cut at each await: what did not return is not notified, and after `flush` all is still."""
    async with open_pair() as pair:
        endpoint = await pair.connect()
        for nbytes in (64, 8 * 2**20):
            for num_passes in range(12):
                (slot,), source = pair.slots([nbytes]), bytearray(b"\1") * nbytes
                remote = pair.receiver.expose(slot, pair.sender.name)
                returned = await _put_and_cancel(endpoint, memoryview(source), remote, num_passes)
                await endpoint.flush()
                source[:] = b"\2" * nbytes
                before = pair.read(slot)
                assert await pair.receiver.withdraw(remote)
                await endpoint.send(b"end")
                received = [await pair.receive()]
                if received != [b"end"]:
                    received.append(await pair.receive())
                assert received == ([b"put", b"end"] if returned else [b"end"])
                assert pair.read(slot) == before, "bytes changed after flush"
                assert 2 not in before, "the source was read after flush"


async def check_a_withdrawn_slot_is_not_written(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()
        for slot in pair.slots(_SIZES):
            nbytes = slot.nbytes
            remote = pair.receiver.expose(slot, pair.sender.name)
            assert await pair.receiver.withdraw(remote)
            assert await pair.receiver.withdraw(remote), "taking back twice is harmless"
            await endpoint.put(memoryview(b"\1" * nbytes), remote, b"put")
            await endpoint.flush()
            await endpoint.send(b"end")
            assert await pair.receive() == b"end"
            assert not any(pair.read(slot))


async def check_a_slot_takes_one_put(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()
        for slot in pair.slots(_SIZES):
            nbytes = slot.nbytes
            remote = pair.receiver.expose(slot, pair.sender.name)
            await endpoint.put(memoryview(b"\1" * nbytes), remote, b"first")
            assert await pair.receive() == b"first"
            await endpoint.put(memoryview(b"\2" * nbytes), remote, b"second")
            await endpoint.flush()
            await endpoint.send(b"end")
            assert await pair.receive() == b"end"
            assert pair.read(slot) == b"\1" * nbytes


async def check_wrong_sizes_are_refused(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()
        remote = pair.receiver.expose(pair.slots([8])[0], pair.sender.name)
        for call in (
            lambda: endpoint.put(memoryview(bytes(7)), remote, b""),
            lambda: endpoint.put(memoryview(bytes(8)), remote, bytes(65 * 1024)),
            lambda: endpoint.send(bytes(65 * 1024)),
        ):
            await _raises(ProtocolError, call)
        await endpoint.send(bytes(64 * 1024))
        assert await pair.receive() == bytes(64 * 1024)


async def check_the_inbox_is_bounded(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()
        sent = 0

        async def send() -> None:
            nonlocal sent
            for index in range(10_000):
                await endpoint.send(index.to_bytes(4, "little"))
                sent += 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            await anyio.wait_all_tasks_blocked()
            assert 0 < sent < 10_000, "a sender must wait for a reader"
            for index in range(2_000):
                assert await pair.receive() == index.to_bytes(4, "little")
            assert sent >= 2_000
            tasks.cancel_scope.cancel()


async def check_a_closed_peer_is_noticed(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()

        async def send_until_blocked() -> None:
            while True:
                await endpoint.send(b"x")

        async def close() -> None:
            await anyio.wait_all_tasks_blocked()
            await pair.receiver.aclose()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
            await _raises(PeerLost, send_until_blocked)
        await _raises(PeerLost, lambda: endpoint.send(b"x"))
        await endpoint.flush()


async def check_a_closed_endpoint_raises(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()
        remote = pair.receiver.expose(pair.slots([8])[0], pair.sender.name)

        async def send_until_blocked() -> None:
            while True:
                await endpoint.send(b"x")

        async def close() -> None:
            await anyio.wait_all_tasks_blocked()
            await endpoint.aclose()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
            await _raises(EndpointClosed, send_until_blocked)
        await endpoint.aclose()
        await _raises(EndpointClosed, lambda: endpoint.send(b"x"))
        await _raises(EndpointClosed, lambda: endpoint.put(memoryview(bytes(8)), remote, b""))


async def check_a_closed_transport_raises(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        await pair.connect()
        await pair.sender.aclose()
        await pair.sender.aclose()
        await _raises(EndpointClosed, pair.connect)
        try:
            pair.sender.expose(memoryview(bytearray(1)), pair.receiver.name)
        except EndpointClosed:
            pass
        else:
            raise AssertionError("a closed transport exposed memory")
        await _raises(anyio.EndOfStream, pair.sender.inbox.receive)


async def check_both_ends_close_at_the_same_time(open_pair: OpenPair) -> None:
    """In every order, and with puts running both ways: each end settles what the other waits for."""
    for k, order in enumerate(permutations(range(4))):
        async with open_pair() as pair:
            there = await pair.connect()
            back = await pair.receiver.connect(pair.sender.address, pair.sender.name)
            closings = (there.aclose, there.flush, pair.sender.aclose, pair.receiver.aclose)
            with anyio.fail_after(_CLOSE_DEADLINE_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_put_until_over, pair, there, pair.receiver)
                    tasks.start_soon(_put_until_over, pair, back, pair.sender)
                    for _ in range(k % 3):
                        await anyio.lowlevel.checkpoint()
                    for index in order:
                        tasks.start_soon(closings[index])


async def check_connecting_to_a_closing_peer_ends(open_pair: OpenPair) -> None:
    """Whether it succeeds is a matter of order. A peer that has closed may never answer: then the caller's
    deadline ends it, or the end of its own transport."""
    for num_passes in range(6):
        async with open_pair() as pair:
            with anyio.fail_after(_CLOSE_DEADLINE_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_connect_if_open, pair)
                    for _ in range(num_passes):
                        await anyio.lowlevel.checkpoint()
                    await pair.receiver.aclose()
                    await pair.sender.aclose()


async def check_a_closed_endpoint_is_still(open_pair: OpenPair) -> None:
    """Every call of `aclose` returns when all is still, also one that finds another closing."""
    async with open_pair() as pair:
        with anyio.fail_after(_CLOSE_DEADLINE_S):
            for nbytes in (64, 8 * 2**20):
                endpoint = await pair.connect()
                (slot,), source = pair.slots([nbytes]), bytearray(b"\1") * nbytes
                remote = pair.receiver.expose(slot, pair.sender.name)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_put_until_closed, endpoint, source, remote)
                    await anyio.lowlevel.checkpoint()
                    for _ in range(2):
                        tasks.start_soon(_close_and_overwrite, endpoint, source)
                assert await pair.receiver.withdraw(remote)
                assert 2 not in pair.read(slot), "the source was read after aclose"
                await endpoint.flush()


async def check_counters_count_what_was_sent(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()
        for slot in pair.slots(_SIZES):
            remote = pair.receiver.expose(slot, pair.sender.name)
            await endpoint.put(memoryview(bytes(slot.nbytes)), remote, b"")
        await endpoint.send(b"x")
        expected = {"puts": len(_SIZES), "put_nbytes": sum(_SIZES), "messages": 1}
        assert pair.sender.counters.items() >= expected.items()
        assert set(pair.receiver.counters.values()) == {0}


async def check_no_task_is_left(open_pair: OpenPair) -> None:
    before = {task.id for task in anyio.get_running_tasks()}
    async with open_pair() as pair:
        endpoint = await pair.connect()
        await endpoint.send(b"x")
        await pair.receive()
    assert {task.id for task in anyio.get_running_tasks()} <= before


CHECKS: Final[tuple[Callable[[OpenPair], Awaitable[None]], ...]] = tuple(
    check for name, check in sorted(globals().items()) if name.startswith("check_")
)


async def _put_and_cancel(
    endpoint: Endpoint, source: memoryview, remote: RemoteSlot, num_passes: int
) -> bool:
    """Cancel a put after some passes of the loop; True if it had returned."""
    returned = False

    async def put() -> None:
        nonlocal returned
        await endpoint.put(source, remote, b"put")
        returned = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(put)
        for _ in range(num_passes):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    return returned


async def _connect_if_open(pair: Pair) -> None:
    with suppress(PeerLost, EndpointClosed):
        await pair.connect()


async def _put_until_closed(endpoint: Endpoint, source: bytearray, remote: RemoteSlot) -> None:
    with suppress(EndpointClosed):
        await endpoint.put(memoryview(source), remote, b"put")


async def _close_and_overwrite(endpoint: Endpoint, source: bytearray) -> None:
    await endpoint.aclose()
    source[:] = b"\2" * len(source)


async def _put_until_over(pair: Pair, endpoint: Endpoint, receiver: Transport) -> None:
    """Put once and again until one of the two is closed."""
    (slot,) = pair.slots([_SIZES[-1]], receiver)
    with suppress(PeerLost, EndpointClosed):
        while True:
            remote = receiver.expose(slot, "sender")
            await endpoint.put(memoryview(bytearray(_SIZES[-1])), remote, b"put")


async def _raises(kind: type[Exception], call: Callable[[], Awaitable[object]]) -> None:
    try:
        with anyio.fail_after(DEADLINE_S):
            await call()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")
