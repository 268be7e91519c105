"""Where the coordinator is found: `tcp://host:port`, `file:///path` or `env://`."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

import msgspec

from wbridge.control.auth import new_secret
from wbridge.control.tcp import is_loopback, join_address, split_address
from wbridge.errors import ConfigError, PeerLost

DEFAULT_PORT_OFFSET = 1
"""With `env://` and no WBRIDGE_PORT, the coordinator listens this far above MASTER_PORT."""


class TcpRendezvous(msgspec.Struct, frozen=True):
    """A known address. `port` 0 is possible only for a coordinator whose address is told to the others."""

    host: str
    port: int


class FileRendezvous(msgspec.Struct, frozen=True):
    """A file that the coordinator writes, with its address and the secret."""

    path: str


Rendezvous: TypeAlias = TcpRendezvous | FileRendezvous


class Meeting(msgspec.Struct, frozen=True):
    """Where the coordinator listens, and the secret it expects."""

    address: str
    secret: bytes


def parse_rendezvous(url: str, environ: Mapping[str, str]) -> Rendezvous:
    """Read a rendezvous URL; `env://` is resolved with `environ`, which only `env://` needs.

    Raises:
        ConfigError: the URL is none of the three forms, or a variable it needs is missing.
    """
    parts = urlsplit(url)
    if parts.scheme == "tcp" and parts.netloc and parts.path in ("", "/"):
        return TcpRendezvous(*split_address(parts.netloc))
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return FileRendezvous(unquote(parts.path))
    if parts.scheme == "env" and not parts.netloc and not parts.path:
        return _from_environ(environ)
    raise ConfigError(
        f"rendezvous {url!r} is not understood; write tcp://host:port, file:///absolute/path or env://"
    )


def _from_environ(environ: Mapping[str, str]) -> TcpRendezvous:
    host = environ.get("MASTER_ADDR")
    if not host:
        raise ConfigError(
            "rendezvous env:// needs MASTER_ADDR; start with torchrun, or write tcp://host:port"
        )
    name = "WBRIDGE_PORT" if "WBRIDGE_PORT" in environ else "MASTER_PORT"
    text = environ.get(name, "")
    offset = 0 if name == "WBRIDGE_PORT" else DEFAULT_PORT_OFFSET
    if not text.isdecimal() or not 0 < int(text) + offset <= 65535:
        raise ConfigError(f"rendezvous env:// needs a port, but {name} is {text!r}; set WBRIDGE_PORT")
    return TcpRendezvous(host, int(text) + offset)


def bind_address(rendezvous: Rendezvous) -> tuple[str, int]:
    """Return the host and port on which a coordinator for this rendezvous listens."""
    if isinstance(rendezvous, TcpRendezvous):
        return rendezvous.host, rendezvous.port
    return "127.0.0.1", 0


def choose_secret(rendezvous: Rendezvous, secret: bytes) -> bytes:
    """Return the coordinator's secret: the given one, or a fresh one that the rendezvous file will carry.

    Raises:
        ConfigError: none is given, none can be handed over, and other machines can connect.
    """
    if secret:
        return secret
    if isinstance(rendezvous, FileRendezvous):
        return new_secret()
    if is_loopback(rendezvous.host):
        return b""
    raise ConfigError(
        f"a coordinator on {rendezvous.host} can be reached from other machines; set the same"
        " WBRIDGE_SECRET for every worker, or use a file:/// rendezvous"
    )


def publish(rendezvous: Rendezvous, meeting: Meeting) -> None:
    """Make the coordinator's address known: a file is replaced at once and readable by its owner only."""
    if not isinstance(rendezvous, FileRendezvous):
        return
    path = Path(rendezvous.path)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.encode(meeting))
            draft.replace(path)
        except BaseException:  # whatever it is, no draft stays; raised again
            draft.unlink(missing_ok=True)
            raise
    except OSError as exc:
        raise ConfigError(f"cannot write rendezvous file {path}: {exc}") from exc


def withdraw(rendezvous: Rendezvous, meeting: Meeting) -> None:
    """Remove the file again, unless another coordinator has replaced it. Idempotent."""
    with contextlib.suppress(PeerLost, ConfigError):
        if isinstance(rendezvous, FileRendezvous) and _read(rendezvous) == meeting:
            Path(rendezvous.path).unlink(missing_ok=True)


def look_up(rendezvous: Rendezvous, secret: bytes) -> Meeting:
    """Return where to connect, as far as it is known now. `secret` wins over the file's, if not empty.

    Raises:
        PeerLost: the file is not there yet; try again later.
        ConfigError: the file is not a rendezvous file, or others may read it.
    """
    if isinstance(rendezvous, TcpRendezvous):
        return Meeting(join_address(rendezvous.host, rendezvous.port), secret)
    meeting = _read(rendezvous)
    return Meeting(meeting.address, secret) if secret else meeting


def _read(rendezvous: FileRendezvous) -> Meeting:
    path = rendezvous.path
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(64 * 1024)
    except FileNotFoundError as exc:
        raise PeerLost(f"no coordinator has written {path} yet") from exc
    except OSError as exc:
        raise ConfigError(f"cannot read rendezvous file {path}: {exc}") from exc
    if mode & 0o077:
        raise ConfigError(
            f"rendezvous file {path} may be read or written by others; remove it, it holds a secret"
        )
    try:
        return msgspec.json.decode(content, type=Meeting)
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"{path} is no rendezvous file: {exc}; remove it or name another path") from exc
