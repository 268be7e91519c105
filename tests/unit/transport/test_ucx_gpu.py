"""Memory of GPUs over UCX: which kinds there are, who may write which slot, and when its bytes are there."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from tests.models.far import FAR
from tests.models.networked import Gpu, NetworkedDevice, let_ucx_reach_gpus
from wbridge.config import Config
from wbridge.device.base import Access
from wbridge.device.cpu import CpuBuffer, CpuDevice
from wbridge.errors import ConfigError, NativeUnavailable
from wbridge.native.ucx import why_missing
from wbridge.transport.select import Transports, open_transports
from wbridge.transport.ucx_native import NativeUcxWorker, memory_kinds
from wbridge.transport.ucxx import UcxxTransport

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(why_missing() is not None, reason="the native UCX worker is not built"),
]

NBYTES = 300_000


@pytest.mark.parametrize("transports", ["tcp", "sm,self"])
async def test_host_memory_that_is_named_so_is_written(
    transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    async with (
        UcxxTransport("sender", native=True) as sender,
        UcxxTransport("receiver", native=True) as receiver,
    ):
        buffer = CpuDevice().allocate(NBYTES, "pinned")
        receiver.register(buffer)
        endpoint = await sender.connect(receiver.address, "receiver")
        remote = receiver.expose(buffer.view, "sender")
        await endpoint.put(memoryview(b"\5" * NBYTES), remote, b"put")
        assert (await receiver.inbox.receive()).payload == b"put"
        assert buffer.view == b"\5" * NBYTES
        assert sender.counters["one_sided_nbytes"] == NBYTES
        assert endpoint.put_from_gpu is None


async def test_memory_of_a_gpu_that_ucx_does_not_reach_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert "cuda" not in memory_kinds(None)
    worker = NativeUcxWorker(lambda _: None)
    try:
        assert not worker.reaches_gpu
        memory = memoryview(bytearray(4096))
        with pytest.raises(ConfigError, match=r"no transport for memory of kind 'cuda'.*UCX_TLS=.*cuda_copy"):
            worker.map(memory, "cuda")
        with pytest.raises(ValueError, match="'host' or 'cuda'"):
            worker.map(memory, "rocm")  # type: ignore[arg-type]  # which is the point
        number, key = worker.map(memory, "host")
        assert key
        worker.unmap(number)
    finally:
        worker.close()


async def test_the_thread_of_ucx_enters_the_gpu_before_anything_else() -> None:
    gpu = Gpu()
    NativeUcxWorker(lambda _: None, gpu).close()
    assert len(gpu.threads) == 1
    assert gpu.threads[0] != threading.get_ident()
    gpu.code = 201
    with pytest.raises(NativeUnavailable, match="code 201"):
        NativeUcxWorker(lambda _: None, gpu)


class Slots(NamedTuple):
    """A buffer of the receiver on its GPU."""

    sender: UcxxTransport
    receiver: UcxxTransport
    device: NetworkedDevice
    buffer: CpuBuffer


@asynccontextmanager
async def opened(
    monkeypatch: pytest.MonkeyPatch, sender_gpu: Gpu | None, receiver_gpu: Gpu | None
) -> AsyncIterator[Slots]:
    let_ucx_reach_gpus(monkeypatch)
    device = NetworkedDevice()
    buffer = device.allocate(NBYTES, "device")
    async with (
        UcxxTransport("sender", host="a", native=True, gpu=sender_gpu) as sender,
        UcxxTransport("receiver", host="b", native=True, gpu=receiver_gpu) as receiver,
    ):
        receiver.register(buffer)
        yield Slots(sender, receiver, device, buffer)
    device.close()


@pytest.mark.parametrize("nbytes", [16, NBYTES])
async def test_a_slot_is_settled_before_its_notification(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a small one, whose bytes the host would write if it were the host's."""
    gpu = Gpu()
    async with opened(monkeypatch, Gpu(), gpu) as (sender, receiver, device, buffer):
        endpoint = await sender.connect(receiver.address, "receiver")
        assert endpoint.put_from_gpu is not None
        remote = receiver.expose(buffer.addresses[:nbytes], "sender")
        await endpoint.put(memoryview(b"\7" * nbytes), remote, b"put")
        assert (await receiver.inbox.receive()).payload == b"put"
        assert gpu.num_settled == 1
        assert buffer.tensor[:nbytes].eq(7).all()
        host = device.allocate(NBYTES, "pinned")
        receiver.register(host)
        await endpoint.put(memoryview(bytes(NBYTES)), receiver.expose(host.view, "sender"), b"host")
        assert (await receiver.inbox.receive()).payload == b"host"
        assert gpu.num_settled == 1


async def test_nobody_hears_of_a_slot_that_the_gpu_does_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    async with opened(monkeypatch, Gpu(), gpu) as (sender, receiver, _, buffer):
        endpoint = await sender.connect(receiver.address, "receiver")
        remote = receiver.expose(buffer.addresses, "sender")
        gpu.has_failed = True
        await endpoint.put(memoryview(bytes(NBYTES)), remote, b"put")
        await endpoint.send(b"end")
        assert (await receiver.inbox.receive()).payload == b"end"


@pytest.mark.parametrize("has_gpu", [(True, False), (False, True)])
async def test_a_slot_on_a_gpu_that_ucx_does_not_reach_is_not_exposed(
    has_gpu: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender_gpu, receiver_gpu = (Gpu() if has else None for has in has_gpu)
    async with opened(monkeypatch, sender_gpu, receiver_gpu) as (sender, receiver, _, buffer):
        endpoint = await sender.connect(receiver.address, "receiver")
        assert endpoint.put_from_gpu is None
        with pytest.raises(ConfigError, match="UCX_TLS"):
            receiver.expose(buffer.addresses[:16], "sender")


async def test_a_slot_on_a_gpu_whose_writer_has_gone_is_never_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes would come as a message, into memory that the host must not touch."""
    async with opened(monkeypatch, Gpu(), Gpu()) as (sender, receiver, _, buffer):
        remote = receiver.expose(buffer.addresses, "sender")
        assert await receiver.withdraw(remote)
        endpoint = await sender.connect(receiver.address, "receiver")
        await endpoint.put(memoryview(b"\1" * NBYTES), remote, b"put")
        await endpoint.send(b"end")
        assert (await receiver.inbox.receive()).payload == b"end"
        assert not buffer.tensor.any()


BARRED, ALONE = Access(memory=""), Access("GPU b", ("host", "GPU b"))


@pytest.mark.parametrize(
    ("accesses", "prefers_gpu", "by_ucx"),
    [
        ((BARRED, BARRED), True, True),
        ((FAR, ALONE), True, True),
        ((FAR, FAR), True, False),
        ((FAR, ALONE), False, False),
    ],
)
async def test_ucx_takes_a_pair_of_one_host_if_it_alone_reaches_both_gpus(
    accesses: tuple[Access, Access], prefers_gpu: bool, by_ucx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_ucx_reach_gpus(monkeypatch)

    def one(name: str, access: Access) -> Transports:
        return open_transports(Config(), name, name=name, access=access, gpu=Gpu())

    async with one("a", accesses[0]) as a, one("b", accesses[1]) as b:
        there = await a.connect(b.address, "b", prefers_gpu=prefers_gpu)
        back = await b.connect(a.address, "a", prefers_gpu=prefers_gpu)
        for own, peer, endpoint in ((a, b, there), (b, a, back)):
            assert (endpoint.put_from_gpu is not None) is by_ucx
            assert (endpoint.fill is None) is by_ucx
            why = own.why_not_on_device(peer.address, endpoint)
            assert (why is None) is (by_ucx or accesses == (FAR, FAR))
