"""The nearest way to each peer, and who is near."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from wbridge.config import Config
from wbridge.device.cpu import CpuDevice
from wbridge.errors import ConfigError, NativeUnavailable, ProtocolError
from wbridge.transport import select, ucxx
from wbridge.transport.host import host_identity, pid_of, process_token
from wbridge.transport.loopback import LoopbackEndpoint
from wbridge.transport.select import Transports, open_transports
from wbridge.transport.ucx_endpoint import UcxxEndpoint
from wbridge.transport.unix_endpoint import SharedMemoryEndpoint

pytestmark = pytest.mark.anyio


def transports(name: str, *, process: str = "p", transport: str = "auto", host: str = "") -> Transports:
    return open_transports(Config(transport=transport, host=host), process, name=name)  # type: ignore[arg-type]


async def exchange(sender: Transports, receiver: Transports, nbytes: int = 10_000) -> object:
    endpoint = await sender.connect(receiver.address, receiver.name)
    await receiver.connect(sender.address, sender.name)  # as a receiver does, for its credits
    buffer = CpuDevice().allocate(nbytes, "pinned", shared=True)
    receiver.register(buffer)
    slot = buffer.view
    await endpoint.put(memoryview(b"\1" * nbytes), receiver.expose(slot, sender.name), b"put")
    message = await receiver.inbox.receive()
    assert await receiver.withdraw(receiver.expose(slot, sender.name))
    receiver.unregister(buffer)
    assert (message.peer, message.payload, slot) == (sender.name, b"put", b"\1" * nbytes)
    return endpoint


async def test_inside_one_process_the_way_is_loopback() -> None:
    async with transports("a", transport="loopback") as a, transports("b", transport="loopback") as b:
        assert isinstance(await exchange(a, b), LoopbackEndpoint)
        assert a.link_to(b.address) == "process"
        assert a.counters_by_link["process"] == {
            "puts": 1,
            "put_nbytes": 10_000,
            "messages": 0,
            "one_sided_nbytes": 0,
        }
        assert a.counters == a.counters_by_link["process"]


async def test_each_link_class_has_its_own_counters_and_all_share_one_inbox() -> None:
    pytest.importorskip("ucxx", reason="the install without extras has no ucxx")
    kinds = {"near": LoopbackEndpoint, "other process": SharedMemoryEndpoint, "far": UcxxEndpoint}
    async with (
        transports("a", host="h") as a,
        transports("near", host="h") as near,
        transports("other process", process="q", host="h") as other,
        transports("far", process="r", host="k") as far,
    ):
        for sender in (near, other, far):
            endpoint = await exchange(sender, a)
            assert isinstance(endpoint, kinds[sender.name])
            await exchange(a, sender)
        assert [a.link_to(peer.address) for peer in (near, other, far)] == ["process", "host", "network"]
        assert {link: c["puts"] for link, c in a.counters_by_link.items()} == {
            "process": 1,
            "host": 1,
            "network": 1,
        }
        assert a.counters["put_nbytes"] == 30_000


async def test_a_forced_transport_is_used_inside_one_process_too_and_by_both_sides() -> None:
    pytest.importorskip("ucxx", reason="the install without extras has no ucxx")
    for forced, kind in (("ucxx", UcxxEndpoint), ("shared_memory", SharedMemoryEndpoint)):
        for other in (forced, "auto"):
            async with transports("a", transport=forced) as a, transports("b", transport=other) as b:
                assert isinstance(await exchange(a, b), kind)
                assert isinstance(await exchange(b, a), kind)


@pytest.mark.parametrize(("forced", "beyond"), [("loopback", "process"), ("shared_memory", "host")])
async def test_a_forced_transport_does_not_reach_further(forced: str, beyond: str) -> None:
    async with (
        transports("a", transport=forced, host="h") as a,
        transports("b", process="q", transport=forced, host="k") as b,
    ):
        with pytest.raises(ConfigError, match=rf"a: b is on another {beyond}.*set transport='auto'"):
            await a.connect(b.address, "b")


async def test_without_ucxx_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    monkeypatch.setattr(ucxx, "why_missing", lambda: "it was not built")
    monkeypatch.setattr(select, "_has_ucxx", lambda: False)
    async with transports("a") as a, transports("b", process="q", host="k") as b:
        with pytest.raises(NativeUnavailable, match=r"pip install -e"):
            await a.connect(b.address, "b")
    with pytest.raises(NativeUnavailable, match=r"pip install -e"):
        async with transports("a", transport="ucxx"):
            raise AssertionError("must not open")


async def test_an_address_of_something_else_is_refused() -> None:
    async with transports("a", transport="loopback") as a:
        with pytest.raises(ProtocolError, match="address of b"):
            await a.connect(b"\x80nonsense", "b")


def test_importing_the_transports_loads_no_native_code() -> None:
    code = "import sys, wbridge.transport.select; assert 'ucxx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_host_identity_is_stable_and_can_be_overridden() -> None:
    assert host_identity() == host_identity() != host_identity("rack 7")
    assert host_identity("rack 7") == "rack 7"


def test_a_process_token_names_one_process() -> None:
    assert process_token() == process_token(os.getpid()) != process_token(os.getppid())
    assert pid_of(process_token()) == os.getpid()
    assert pid_of("0/1/1") is None, "another namespace"
    with pytest.raises(ProcessLookupError):
        process_token(2**22 + 1)
