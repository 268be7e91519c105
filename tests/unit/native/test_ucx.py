"""The native UCX worker by itself: two of them in this process."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import select
import signal
import threading
import time
import types
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from wbridge.errors import NativeUnavailable
from wbridge.native import ucx

if TYPE_CHECKING:
    from wbridge.native._ucx import Worker

FINISHED, FRAME = 0, 1
TAG, FRAME_NBYTES = 1, 1024


@pytest.fixture(params=["all", "tcp"])
def workers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Worker, Worker]]:
    if (why := ucx.why_missing()) is not None:
        pytest.skip(why)
    monkeypatch.setenv("UCX_TLS", request.param)
    pair = open_worker(), open_worker()
    yield pair
    for worker in pair:
        worker.close(0.1)


def open_worker() -> Worker:
    return ucx.worker_type()(required=[], preferred=[], frame_tag=TAG, frame_nbytes=FRAME_NBYTES)


def happened(worker: Worker, count: int) -> list[tuple[int, int, bytes]]:
    events: list[tuple[int, int, bytes]] = []
    while len(events) < count:
        select.select([worker.descriptor], [], [], 20)
        events += worker.drain()
    return events


def address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.mark.parametrize("watched", [False, True])
def test_frames_keep_their_order(workers: tuple[Worker, Worker], watched: bool) -> None:
    there, here = workers
    route = here.connect(there.address, watched=watched)
    frames = [bytes([k]) * (1 + k * 17 % FRAME_NBYTES) for k in range(100)]
    numbers = [here.send_frame(route, frame) for frame in frames]
    assert [frame for _, _, frame in happened(there, 100)] == frames
    assert sorted(happened(here, 100)) == [(FINISHED, number, b"") for number in numbers]


@pytest.mark.parametrize("watched", [False, True])
def test_a_put_has_arrived_when_it_is_over(workers: tuple[Worker, Worker], watched: bool) -> None:
    there, here = workers
    memory = bytearray(3_000_000)
    region = there.map(memory, kind="host")
    route = here.connect(there.address, watched=watched)
    key = here.unpack(route, there.pack(region))
    for stamp, offset, nbytes in ((1, 0, 3_000_000), (2, 5, 1_000_000), (3, 2_999_999, 1)):
        source = bytes([stamp]) * nbytes
        number = here.put(route, source, address(memory) + offset, key, kind="host")
        assert happened(here, 1) == [(FINISHED, number, b"")]
        assert memory[offset : offset + nbytes] == source
    here.forget_key(key)
    there.unmap(region)


def test_a_worker_looks_around_before_it_sleeps(workers: tuple[Worker, Worker]) -> None:
    there, here = workers
    route = here.connect(there.address, watched=False)
    before = there.num_wakeups
    for _ in range(500):
        here.send_frame(route, b"frame")
        happened(there, 1)
        happened(here, 1)
    assert there.num_wakeups - before < 400  # on a busy machine it may be late for some


@pytest.mark.parametrize("num_runs", [0, 1, 3000])
def test_runs_are_over_together(workers: tuple[Worker, Worker], num_runs: int) -> None:
    there, here = workers
    memory, source = bytearray(6_000_000), bytearray(os.urandom(6_000_000))
    route = here.connect(there.address, watched=False)
    key = here.unpack(route, there.pack(there.map(memory, kind="host")))
    sizes = [1 + 37 * k % 1900 for k in range(num_runs)]
    rows = [(2000 * k, 2000 * (num_runs - 1 - k), size) for k, size in enumerate(sizes)]
    table = array("Q", [number for row in rows for number in row])
    number = here.put_runs(route, table, address(source), address(memory), key)
    assert happened(here, 1) == [(FINISHED, number, b"")]
    wanted = bytearray(len(memory))
    for start, target, size in rows:
        wanted[target : target + size] = source[start : start + size]
    assert memory == wanted


def test_a_put_keeps_a_key_that_is_forgotten(workers: tuple[Worker, Worker]) -> None:
    there, here = workers
    memory, source = bytearray(20_000_000), b"\1" * 20_000_000
    route = here.connect(there.address, watched=False)
    packed = there.pack(there.map(memory, kind="host"))
    key = here.unpack(route, packed)
    number = here.put(route, source, address(memory), key, kind="host")
    here.forget_key(key)
    here.unpack(route, packed)  # where the old one was, if that was given back
    assert happened(here, 1) == [(FINISHED, number, b"")]
    assert memory == source


def test_messages_find_the_receive_with_their_tag(workers: tuple[Worker, Worker]) -> None:
    there, here = workers
    route = here.connect(there.address, watched=False)
    memories = [bytearray(500_000), bytearray(10)]
    receives = [there.receive(memory, 7 + k) for k, memory in enumerate(memories)]
    sent = [bytes([k + 1]) * len(memory) for k, memory in enumerate(memories)]  # lent until all is over
    for k in (1, 0):
        here.send(route, sent[k], 7 + k)
    assert sorted(happened(there, 2)) == [(FINISHED, number, b"") for number in receives]
    assert memories == sent


def test_what_does_not_exist_is_an_error(workers: tuple[Worker, Worker]) -> None:
    there, here = workers
    with pytest.raises(RuntimeError, match="ucp_"):
        here.connect(b"\0" * len(there.address), watched=False)
    with pytest.raises(IndexError):
        here.pack(999)
    with pytest.raises(ValueError, match="'host' or 'cuda'"):
        here.map(bytearray(64), kind="rocm")
    with pytest.raises(ValueError, match="'host' or 'cuda'"):
        here.put(1, b"x", 0, 1, kind="rocm")
    number = here.send_frame(999, b"x")
    ((kind, of, reason),) = happened(here, 1)
    assert (kind, of) == (FINISHED, number) and reason
    number = here.put_runs(999, array("Q", [0, 0, 1]), 0, 0, 999)
    ((kind, of, reason),) = happened(here, 1)
    assert (kind, of) == (FINISHED, number) and reason
    for worker in workers:
        worker.close(0)
        worker.close(0)
        with pytest.raises(RuntimeError, match="closed"):
            worker.send_frame(1, b"x")


def test_closing_leaves_no_descriptor_and_no_thread(workers: tuple[Worker, Worker]) -> None:
    def held() -> tuple[int, int]:
        gc.collect()  # what earlier tests have left
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    there, _ = workers
    before = held()
    for _ in range(3):
        worker = open_worker()
        route = worker.connect(there.address, watched=True)
        worker.send_frame(route, b"x")
        waiting = bytearray(8)
        worker.receive(waiting, 5)
        happened(there, 1)
        worker.close(0.1)
    until = time.monotonic() + 2  # the kernel lists a thread a little longer than joining it takes
    while held()[1] != before[1] and time.monotonic() < until:
        time.sleep(0.01)
    assert held()[1] == before[1]
    assert held()[0] <= before[0] + 3, "at most what the peer still holds of the connections"


def test_an_idle_worker_sleeps(workers: tuple[Worker, Worker]) -> None:
    there, here = workers
    route = here.connect(there.address, watched=False)
    here.send_frame(route, b"x")
    happened(there, 1)
    happened(here, 1)
    before = here.num_wakeups
    select.select([here.descriptor], [], [], 0.05)
    assert here.num_wakeups - before <= 3


def test_a_child_of_a_fork_can_end(workers: tuple[Worker, Worker]) -> None:
    child = os.fork()
    if child == 0:
        for worker in workers:
            worker.close(0.1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_that_was_forked_while_a_worker_closed_can_end(workers: tuple[Worker, Worker]) -> None:
    there, here = workers
    unread = bytes(1_000_000)
    here.send(here.connect(there.address, watched=False), unread, 7)
    closing = threading.Thread(target=here.close, args=(0.3,))
    closing.start()
    closing.join(0.05)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        here.close(0)
        os._exit(0)
    closing.join()
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (ModuleNotFoundError("No module named 'wbridge.native._ucx'"), "without UCX's headers"),
        (ImportError("libucp.so.0: cannot open"), "does not load: libucp.so.0"),
        (types.SimpleNamespace(INTERFACE=0, load_library=lambda: None), "from other sources"),
    ],
)
def test_the_reason_comes_with_its_remedy(
    found: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> object:
        if isinstance(found, ImportError):
            if name == "libucx":
                raise ModuleNotFoundError(name)
            raise found
        return found

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(NativeUnavailable, match="pip install") as raised:
        ucx.worker_type()
    assert reason in str(raised.value)
