"""Mutual proof that both ends of a connection know the shared secret, without revealing it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from wbridge.control.messages import PROTOCOL_VERSION, Accepted, Challenge, Message, Proof
from wbridge.errors import AuthenticationError, ProtocolError

NONCE_NBYTES = 32


class Channel(Protocol):
    """What authentication needs of a connection."""

    @property
    def remote(self) -> str:
        """The peer's name for error messages."""
        ...

    async def send(self, message: Message) -> None:
        """Send one message."""
        ...

    async def receive(self) -> Message:
        """Return the next message."""
        ...


def new_secret() -> bytes:
    return secrets.token_bytes(32)


async def authenticate_server(channel: Channel, secret: bytes) -> None:
    """Challenge a peer that has connected, then prove the secret to it. Cancelled: close the channel.

    Raises:
        AuthenticationError: the peer's secret is not ours. Nothing derived from ours was sent.
        ProtocolError: the peer speaks another protocol version, or something else altogether.
    """
    nonce = secrets.token_bytes(NONCE_NBYTES)
    await channel.send(Challenge(nonce, PROTOCOL_VERSION, wbridge_version()))
    proof = await channel.receive()
    if not isinstance(proof, Proof):
        raise ProtocolError(f"{channel.remote} sent {type(proof).__name__} instead of a proof of the secret")
    _check_version(channel, proof.protocol_version, proof.wbridge_version)
    expected = _mac(secret, b"connects", nonce, proof.nonce)
    if len(proof.nonce) != NONCE_NBYTES or not hmac.compare_digest(proof.hmac, expected):
        raise AuthenticationError(f"{channel.remote} does not have this job's secret; {_REMEDY}")
    await channel.send(Accepted(_mac(secret, b"listens", nonce, proof.nonce)))


async def authenticate_client(channel: Channel, secret: bytes) -> None:
    """Answer the challenge of the peer we connected to and check its proof. Cancelled: close the channel.

    Raises:
        AuthenticationError: our secrets differ.
        ProtocolError: the peer speaks another protocol version, or something else altogether.
    """
    challenge = await channel.receive()
    if not isinstance(challenge, Challenge) or len(challenge.nonce) != NONCE_NBYTES:
        raise ProtocolError(
            f"{channel.remote} is no wbridge listener: it began with {type(challenge).__name__}"
        )
    _check_version(channel, challenge.protocol_version, challenge.wbridge_version)
    nonce = secrets.token_bytes(NONCE_NBYTES)
    mac = _mac(secret, b"connects", challenge.nonce, nonce)
    await channel.send(Proof(nonce, PROTOCOL_VERSION, wbridge_version(), mac))
    accepted = await channel.receive()
    expected = _mac(secret, b"listens", challenge.nonce, nonce)
    if not isinstance(accepted, Accepted) or not hmac.compare_digest(accepted.hmac, expected):
        raise AuthenticationError(f"{channel.remote} cannot prove that it has this job's secret; {_REMEDY}")


_REMEDY = "give every worker the same WBRIDGE_SECRET, or the same rendezvous file"


def wbridge_version() -> str:
    try:
        return version("wbridge")
    except PackageNotFoundError:
        return "unknown"


def _mac(secret: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    transcript = b"wbridge|%d|%s|%s|%s" % (PROTOCOL_VERSION, side, server_nonce, client_nonce)
    return hmac.digest(secret, transcript, hashlib.sha256)


def _check_version(channel: Channel, protocol: int, package: str) -> None:
    if protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            f"{channel.remote} speaks control protocol {protocol} (wbridge {package}), this side"
            f" {PROTOCOL_VERSION} (wbridge {wbridge_version()}); install the same wbridge on both"
        )
