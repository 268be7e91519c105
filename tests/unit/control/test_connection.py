from __future__ import annotations

import os
import pickle  # noqa: TID251 the attack, not a use
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from wbridge.control import auth, tcp
from wbridge.control.codec import MAX_UNAUTHENTICATED_NBYTES, encode
from wbridge.control.connection import Connection
from wbridge.control.messages import Bye, Challenge, EpochReady, Join, Message, Proof, StatusRequest
from wbridge.control.tcp import connect_tcp, serve_tcp, split_address
from wbridge.errors import (
    AuthenticationError,
    BarrierTimeout,
    ConfigError,
    EndpointClosed,
    PeerLost,
    ProtocolError,
    WBridgeError,
)
from wbridge.ids import Epoch

pytestmark = pytest.mark.anyio
SECRET = b"shared"


@asynccontextmanager
async def serving(
    handler: Callable[[Connection], Awaitable[None]], secret: bytes = SECRET
) -> AsyncIterator[str]:
    async with anyio.create_task_group() as tasks:
        yield await tasks.start(partial(serve_tcp, handler, secret=secret))
        tasks.cancel_scope.cancel()


async def _together(*works: Callable[[], Awaitable[None]]) -> None:
    async with anyio.create_task_group() as tasks:
        for work in works:
            tasks.start_soon(work)


async def echo(peer: Connection) -> None:
    while True:
        await peer.send(await peer.receive())


async def untouched(peer: Connection) -> None:
    raise AssertionError("a stranger reached the handler")


async def test_a_listener_without_descriptors_waits_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = anyio.Event()
    monkeypatch.setattr(tcp._log, "warning", lambda *_, **__: refused.set())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(echo) as address:
        with socket.socket() as peer:
            resource.setrlimit(resource.RLIMIT_NOFILE, (peer.fileno() + 1, hard))
            try:
                full = [os.dup(peer.fileno()) for _ in iter(_has_room, False)]
                peer.connect(split_address(address))
                await refused.wait()
                for descriptor in full:
                    os.close(descriptor)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        async with await connect_tcp(address, secret=SECRET) as friend:
            await friend.send(Bye())
            assert await friend.receive() == Bye()


def _has_room() -> bool:
    try:
        os.close(os.dup(0))
    except OSError:
        return False
    return True


async def test_messages_arrive_in_order() -> None:
    messages: list[Message] = [EpochReady(Epoch(1, n)) for n in range(20)]
    messages.append(Join(b"m" * 300_000, b"address"))
    async with serving(echo) as address, await connect_tcp(address, secret=SECRET) as peer:
        assert peer.remote == address
        for message in messages:
            await peer.send(message)
        assert [await peer.receive() for _ in messages] == messages


async def test_sends_of_several_tasks_do_not_interleave() -> None:
    sent = [Join(bytes([n]) * 200_000, b"") for n in range(4)]
    async with serving(echo) as address, await connect_tcp(address, secret=SECRET) as peer:
        got: list[Message] = []

        async def receive_all() -> None:
            got.extend([await peer.receive() for _ in sent])

        await _together(receive_all, *(partial(peer.send, message) for message in sent))
    assert sorted(got, key=repr) == sorted(sent, key=repr)


async def test_a_cancelled_receive_loses_nothing() -> None:
    release = anyio.Event()

    async def halves(peer: Connection) -> None:
        frame = encode(EpochReady(Epoch(1, 2)))
        await peer._stream.send(frame[:10])
        await release.wait()
        await peer._stream.send(frame[10:])
        await peer.receive()

    async with serving(halves) as address, await connect_tcp(address, secret=SECRET) as peer:
        with anyio.move_on_after(0.02) as scope:
            await peer.receive()
        assert scope.cancelled_caught
        release.set()
        assert await peer.receive() == EpochReady(Epoch(1, 2))


async def test_messages_are_delivered_whole_and_in_order_until_the_peer_is_lost() -> None:
    """Also those that came, in part or in whole, before the delivery began."""
    messages = [EpochReady(Epoch(1, n)) for n in range(50)]

    async def send_in_parts(peer: Connection) -> None:
        sent = b"".join(map(encode, messages))
        for start in range(0, len(sent), 7):
            await peer.send_frame(sent[start : start + 7])

    async with serving(send_in_parts) as address, await connect_tcp(address, secret=SECRET) as peer:
        taken = [await peer.receive()]
        with pytest.raises(PeerLost, match=address):
            await peer.deliver(taken.append)
    assert taken == messages


async def test_closing_ends_a_delivery() -> None:
    async with serving(echo) as address, anyio.create_task_group() as tasks:
        peer = await connect_tcp(address, secret=SECRET)
        tasks.start_soon(peer.aclose)
        with pytest.raises(EndpointClosed, match=address):
            await peer.deliver(lambda _: None)


async def test_the_loss_of_the_peer_is_told_with_its_name() -> None:
    async def leave(peer: Connection) -> None:
        await peer.aclose()

    async with serving(leave) as address, await connect_tcp(address, secret=SECRET) as peer:
        with pytest.raises(PeerLost, match=address):
            await peer.receive()


async def test_a_closed_connection_says_so() -> None:
    async with serving(echo) as address:
        peer = await connect_tcp(address, secret=SECRET)
        await peer.aclose()
        await peer.aclose()
        with pytest.raises(EndpointClosed):
            await peer.send(Bye())
        with pytest.raises(EndpointClosed):
            await peer.receive()


async def test_nobody_listens() -> None:
    async with serving(echo) as address:
        pass
    with pytest.raises(PeerLost, match=address):
        await connect_tcp(address, secret=SECRET)


@pytest.mark.parametrize(
    "error", [ConfigError("two values"), BarrierTimeout("late", ["rollout/e0[1]"]), PeerLost("an engine")]
)
async def test_the_peer_raises_the_error_with_which_it_is_rejected(error: WBridgeError) -> None:
    async def refuse(peer: Connection) -> None:
        await peer.reject(error)

    async with serving(refuse) as address, await connect_tcp(address, secret=SECRET) as peer:
        with pytest.raises(type(error)) as caught:
            await peer.receive()
    assert str(caught.value) == str(error)
    assert getattr(caught.value, "missing", ()) == getattr(error, "missing", ())


async def test_a_wrong_secret_is_refused_and_nothing_is_revealed() -> None:
    async with serving(untouched) as address:
        with pytest.raises(AuthenticationError, match="WBRIDGE_SECRET"):
            await connect_tcp(address, secret=b"guess")
        with pytest.raises(AuthenticationError):
            await connect_tcp(address, secret=b"")

        host, port = split_address(address)
        async with await anyio.connect_tcp(host, port) as stream:
            stranger = Connection(stream, address)
            challenge = await stranger.receive()
            assert isinstance(challenge, Challenge)
            await stranger.send(Proof(b"n" * 32, challenge.protocol_version, "0", b"m" * 32))
            with pytest.raises(AuthenticationError) as caught:
                await stranger.receive()
            assert SECRET.decode() not in str(caught.value)


async def test_a_listener_without_the_secret_is_not_believed() -> None:
    """An impostor that accepts every proof, and one that sends our own proof back."""

    async def accept_all(peer: Connection, answer: Callable[[Proof], bytes]) -> None:
        await peer.send(Challenge(b"n" * 32, auth.PROTOCOL_VERSION, "0"))
        proof = await peer.receive()
        assert isinstance(proof, Proof)
        await peer.send(auth.Accepted(answer(proof)))
        await peer.send(StatusRequest())

    for answer in (lambda proof: b"m" * 32, lambda proof: bytes(proof.hmac)):
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")

        async def impostor(stream: anyio.abc.SocketStream, answer: Callable[[Proof], bytes] = answer) -> None:
            async with stream:
                await accept_all(Connection(stream, "client"), answer)

        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, impostor)
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            with pytest.raises(AuthenticationError, match="cannot prove"):
                await connect_tcp(f"127.0.0.1:{port}", secret=SECRET)
            tasks.cancel_scope.cancel()


async def test_another_protocol_version_is_named_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(untouched) as address:
        host, port = split_address(address)
        async with await anyio.connect_tcp(host, port) as stream:
            newer = Connection(stream, address)
            await newer.receive()
            await newer.send(Proof(b"n" * 32, 99, "9.9", b"m" * 32))
            with pytest.raises(ProtocolError, match=r"control protocol 99 \(wbridge 9\.9\), this side 1"):
                await newer.receive()

    async def old(peer: Connection) -> None:
        await peer.receive()

    monkeypatch.setattr(tcp, "authenticate_server", _challenge_of_version_99)
    async with serving(old) as address:
        with pytest.raises(ProtocolError, match=r"control protocol 99 \(wbridge 9\.9\), this side 1"):
            await connect_tcp(address, secret=SECRET)


async def _challenge_of_version_99(channel: Connection, secret: bytes) -> None:
    await channel.send(Challenge(b"n" * 32, 99, "9.9"))


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("framed", [False, True])
async def test_c70_a_pickle_has_no_effect(tmp_path: Path, *, framed: bool) -> None:
    """Sent raw or in a well-formed frame, to a port that a stranger can reach: the connection ends."""
    attack = pickle.dumps(Bomb(str(tmp_path / "exploded")))
    if framed:
        attack = len(attack).to_bytes(4, "big") + attack
    async with serving(untouched) as address:
        host, port = split_address(address)
        async with await anyio.connect_tcp(host, port) as stream:
            stranger = Connection(stream, address)
            await stranger.receive()
            await stream.send(attack)
            with pytest.raises(ProtocolError):
                await stranger.receive()
            await stream.send_eof()
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
    assert not (tmp_path / "exploded").exists()


async def test_c70_a_member_cannot_send_a_pickle_either(tmp_path: Path) -> None:
    async with serving(echo) as address, await connect_tcp(address, secret=SECRET) as peer:
        attack = pickle.dumps(Bomb(str(tmp_path / "exploded")))
        await peer._stream.send(len(attack).to_bytes(4, "big") + attack)
        with pytest.raises(ProtocolError):
            await peer.receive()
    assert not (tmp_path / "exploded").exists()


async def test_a_stranger_cannot_make_us_hold_much_memory() -> None:
    async with serving(untouched) as address:
        host, port = split_address(address)
        async with await anyio.connect_tcp(host, port) as stream:
            stranger = Connection(stream, address)
            await stranger.receive()
            await stream.send((MAX_UNAUTHENTICATED_NBYTES + 1).to_bytes(4, "big"))
            with pytest.raises(ProtocolError, match=str(MAX_UNAUTHENTICATED_NBYTES)):
                await stranger.receive()


async def test_c63_twenty_servers_at_once_bind_different_ports() -> None:
    addresses: list[str] = []

    async def start(tasks: anyio.abc.TaskGroup) -> None:
        addresses.append(await tasks.start(partial(serve_tcp, echo, secret=SECRET)))

    async with anyio.create_task_group() as servers:
        async with anyio.create_task_group() as starting:
            for _ in range(20):
                starting.start_soon(start, servers)
        assert len(set(addresses)) == 20
        for address in addresses:
            async with await connect_tcp(address, secret=SECRET) as peer:
                await peer.send(Bye())
                assert await peer.receive() == Bye()
        servers.cancel_scope.cancel()


async def test_a_taken_port_is_named() -> None:
    async with serving(echo) as address:
        host, port = split_address(address)
        with pytest.raises(ConfigError, match=address):
            await serve_tcp(echo, host, port, secret=SECRET)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "head.example"])
async def test_without_a_secret_nothing_leaves_loopback(host: str) -> None:
    with pytest.raises(ConfigError, match="WBRIDGE_SECRET"):
        await serve_tcp(echo, host, secret=b"")
    with pytest.raises(ConfigError, match="WBRIDGE_SECRET"):
        await connect_tcp(f"[{host}]:7717", secret=b"")


async def test_loopback_needs_no_secret() -> None:
    async with serving(echo, secret=b"") as address, await connect_tcp(address, secret=b"") as peer:
        await peer.send(Bye())
        assert await peer.receive() == Bye()


SELF_SIGNED_FOR_TESTS = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgSqshlUS8UsMjLomV
twOLJA7le/IUZTksa4DjvWKtHz6hRANCAAS9tS5CYWWAl4bImICkN/PR8IT2rT3k
TvyJ3H2nmRdqTuFPpFbAt4WYuwX92AlP8ji4cTbz+RpcHUyC2fgE57fq
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBPDCB46ADAgECAgEHMAoGCCqGSM49BAMCMBQxEjAQBgNVBAMMCWxvY2FsaG9z
dDAgFw0yMDAxMDEwMDAwMDBaGA8yMTIwMDEwMTAwMDAwMFowFDESMBAGA1UEAwwJ
bG9jYWxob3N0MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEvbUuQmFlgJeGyJiA
pDfz0fCE9q095E78idx9p5kXak7hT6RWwLeFmLsF/dgJT/I4uHE28/kaXB1Mgtn4
BOe36qMkMCIwDwYDVR0RBAgwBocEfwAAATAPBgNVHRMBAf8EBTADAQH/MAoGCCqG
SM49BAMCA0gAMEUCIQD/oWcjBiWuKNRjDrJnI6IKnNp2Bpr3DdNmwA/XWqVfIgIg
dMgdwSR6sULYumDalOGeBUpQ3IHkNnp/dJ6cbGJzvqE=
-----END CERTIFICATE-----
"""


async def test_tls_carries_the_same_messages(tmp_path: Path) -> None:
    pem = tmp_path / "self_signed.pem"
    pem.write_text(SELF_SIGNED_FOR_TESTS)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem)
    trusting, strange = ssl.create_default_context(cafile=str(pem)), ssl.create_default_context()
    async with anyio.create_task_group() as tasks:
        address = await tasks.start(partial(serve_tcp, echo, secret=SECRET, tls=server))
        async with await connect_tcp(address, secret=SECRET, tls=trusting) as peer:
            await peer.send(Join(b"m" * 100_000, b""))
            assert await peer.receive() == Join(b"m" * 100_000, b"")
        with pytest.raises(AuthenticationError, match="certificate"):
            await connect_tcp(address, secret=SECRET, tls=strange)
        tasks.cancel_scope.cancel()
