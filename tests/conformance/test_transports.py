"""Every transport passes the same checks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing

import anyio
import pytest
import torch

from tests.models.networked import Gpu, NetworkedDevice, let_ucx_reach_gpus
from wbridge.config import Config
from wbridge.device.base import Device, NetworkedGpu
from wbridge.device.select import find_network, open_device, why_no_network
from wbridge.native.ucx import why_missing
from wbridge.testing.conformance import CHECKS, DEADLINE_S
from wbridge.testing.faults import Faults, FaultyTransport
from wbridge.testing.pairs import OpenPair, Pair
from wbridge.transport.loopback import LoopbackTransport
from wbridge.transport.select import open_transports
from wbridge.transport.shared_memory import SharedMemoryTransport
from wbridge.transport.ucxx import UcxxTransport

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def loopback() -> AsyncIterator[Pair]:
    async with LoopbackTransport("sender") as sender, LoopbackTransport("receiver") as receiver:
        yield Pair(sender, receiver)


@asynccontextmanager
async def ucxx() -> AsyncIterator[Pair]:
    async with native_pair("one", "one") as pair:
        yield pair


@asynccontextmanager
async def ucxx_between_hosts() -> AsyncIterator[Pair]:
    async with native_pair("a", "b") as pair:
        yield pair


@asynccontextmanager
async def native_pair(sender_host: str, receiver_host: str) -> AsyncIterator[Pair]:
    if (why := why_missing()) is not None:
        pytest.skip(why)
    async with (
        UcxxTransport("sender", host=sender_host, native=True) as sender,
        UcxxTransport("receiver", host=receiver_host, native=True) as receiver,
    ):
        yield Pair(sender, receiver)


@asynccontextmanager
async def ucxx_in_python() -> AsyncIterator[Pair]:
    async with python_pair("one", "one") as pair:
        yield pair


@asynccontextmanager
async def ucxx_in_python_between_hosts() -> AsyncIterator[Pair]:
    async with python_pair("a", "b") as pair:
        yield pair


@asynccontextmanager
async def python_pair(sender_host: str, receiver_host: str) -> AsyncIterator[Pair]:
    pytest.importorskip("ucxx", reason="the install without extras has no ucxx")
    async with (
        UcxxTransport("sender", host=sender_host, native=False) as sender,
        UcxxTransport("receiver", host=receiver_host, native=False) as receiver,
    ):
        yield Pair(sender, receiver)


@asynccontextmanager
async def ucxx_from_native_to_python() -> AsyncIterator[Pair]:
    pytest.importorskip("ucxx", reason="the install without extras has no ucxx")
    if (why := why_missing()) is not None:
        pytest.skip(why)
    async with (
        UcxxTransport("sender", native=True) as sender,
        UcxxTransport("receiver", native=False) as receiver,
    ):
        yield Pair(sender, receiver)


@asynccontextmanager
async def ucxx_from_python_to_native() -> AsyncIterator[Pair]:
    async with ucxx_from_native_to_python() as pair:
        yield Pair(pair.receiver, pair.sender)


@asynccontextmanager
async def shared_memory() -> AsyncIterator[Pair]:
    async with SharedMemoryTransport("sender") as sender, SharedMemoryTransport("receiver") as receiver:
        yield Pair(sender, receiver)


@asynccontextmanager
async def shared_memory_of_a_gpu() -> AsyncIterator[Pair]:
    """Whose slots are page-locked."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU is visible to torch")
    with closing(open_device("cuda")) as device:
        async with SharedMemoryTransport("sender") as sender, SharedMemoryTransport("receiver") as receiver:
            yield Pair(sender, receiver, device)


@asynccontextmanager
async def ucxx_to_device_memory() -> AsyncIterator[Pair]:
    async with networked_pair("one", "one") as pair:
        yield pair


@asynccontextmanager
async def ucxx_to_device_memory_between_hosts() -> AsyncIterator[Pair]:
    async with networked_pair("a", "b") as pair:
        yield pair


@asynccontextmanager
async def networked_pair(sender_host: str, receiver_host: str) -> AsyncIterator[Pair]:
    """Whose device memory is the host's to UCX, and nobody else touches it."""
    if (why := why_missing()) is not None:
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch, closing(NetworkedDevice()) as device:
        let_ucx_reach_gpus(patch)
        async with gpu_pair(device, Gpu(), sender_host, receiver_host) as pair:
            yield pair


@asynccontextmanager
async def gpu_pair(
    device: Device, gpu: NetworkedGpu, sender_host: str, receiver_host: str
) -> AsyncIterator[Pair]:
    async with (
        UcxxTransport("sender", host=sender_host, native=True, gpu=gpu) as sender,
        UcxxTransport("receiver", host=receiver_host, native=True, gpu=gpu) as receiver,
    ):
        yield Pair(sender, receiver, device, "device")


def ucxx_on_a_gpu(transports: str, sender_host: str, receiver_host: str) -> OpenPair:
    @asynccontextmanager
    async def open_pair() -> AsyncIterator[Pair]:
        if not torch.cuda.is_available():
            pytest.skip("no GPU is visible to torch")
        if (why := why_missing() or why_no_network()) is not None:
            pytest.skip(why)
        gpu = find_network(["cuda:0"])
        assert gpu is not None
        with pytest.MonkeyPatch.context() as patch, closing(open_device("cuda:0")) as device:
            patch.setenv("UCX_TLS", transports)
            async with gpu_pair(device, gpu, sender_host, receiver_host) as pair:
                assert (await pair.connect()).put_from_gpu is not None
                yield pair

    return open_pair


@asynccontextmanager
async def nearest() -> AsyncIterator[Pair]:
    config = Config(transport="loopback")
    async with (
        open_transports(config, "one process", name="sender") as sender,
        open_transports(config, "one process", name="receiver") as receiver,
    ):
        yield Pair(sender, receiver)


@asynccontextmanager
async def faulty() -> AsyncIterator[Pair]:
    """Holding back may reorder endpoints, but must not break any promise."""
    faults = Faults(seed=7, hold_rate=0.5, max_passes=5)
    async with (
        FaultyTransport(await LoopbackTransport("sender").__aenter__(), faults) as sender,
        FaultyTransport(await LoopbackTransport("receiver").__aenter__(), faults) as receiver,
    ):
        yield Pair(sender, receiver)


@pytest.mark.parametrize(
    "open_pair",
    [
        loopback,
        shared_memory,
        pytest.param(shared_memory_of_a_gpu, marks=pytest.mark.gpu),
        ucxx,
        ucxx_between_hosts,
        ucxx_to_device_memory,
        ucxx_to_device_memory_between_hosts,
        *[
            pytest.param(ucxx_on_a_gpu(transports, *hosts), marks=pytest.mark.gpu, id=f"ucxx_on_a_gpu_{name}")
            for name, transports, hosts in (
                ("near", "cuda_copy,cuda_ipc,sm,tcp", ("one", "one")),
                ("far", "tcp,cuda_copy", ("a", "b")),
            )
        ],
        ucxx_in_python,
        ucxx_in_python_between_hosts,
        ucxx_from_native_to_python,
        ucxx_from_python_to_native,
        nearest,
        faulty,
    ],
)
@pytest.mark.parametrize("check", CHECKS)
async def test_conforms(check: Callable[[OpenPair], Awaitable[None]], open_pair: OpenPair) -> None:
    with anyio.fail_after(DEADLINE_S):
        await check(open_pair)
