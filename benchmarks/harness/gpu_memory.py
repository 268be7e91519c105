"""Our page-locked shared memory against torch's, how soon a waiter hears from the device, and digests."""

from __future__ import annotations

import statistics
import time
from contextlib import closing

import anyio
import torch

from benchmarks.harness.gpu_clock import Clock
from wbridge.device.base import Stream
from wbridge.device.digest import Digester, Part
from wbridge.device.select import open_device
from wbridge.layout.region import Strided

SPIN_CYCLES = 200_000_000
"""Some 0.1 s of a GPU's time."""


def measure_pinned(device: str, *, nbytes: int, rounds: int) -> dict[str, float]:
    """Copies of one large tensor both ways, ours and torch's in turn."""
    clock = Clock(device)
    tensor = torch.ones(nbytes, dtype=torch.uint8, device=device)
    with closing(open_device(device)) as opened:
        begin_s = time.perf_counter()
        ours = opened.allocate(nbytes, "pinned", shared=True).tensor
        allocated_s = time.perf_counter() - begin_s
        assert isinstance(ours, torch.Tensor)
        memories = {"ours": ours, "torch": clock.host_memory(tensor)}
        times: dict[str, list[float]] = {f"{way}_{name}": [] for way in ("d2h", "h2d") for name in memories}
        for _ in range(rounds + 1):
            for name, memory in memories.items():
                times[f"d2h_{name}"].append(
                    clock.device_s(lambda m=memory: m.copy_(tensor, non_blocking=True))
                )
                times[f"h2d_{name}"].append(
                    clock.device_s(lambda m=memory: tensor.copy_(m, non_blocking=True))
                )
        speeds = {name: nbytes / statistics.median(found[1:]) / 1e9 for name, found in times.items()}
        del ours, memories, memory
    return {
        "d2h_ratio": speeds["d2h_ours"] / speeds["d2h_torch"],
        "h2d_ratio": speeds["h2d_ours"] / speeds["h2d_torch"],
        **{f"{name}_gb_per_s": speed for name, speed in speeds.items()},
        "allocate_ms": 1e3 * allocated_s,
    }


def measure_wake(device: str, *, rounds: int) -> dict[str, float]:
    """A small kernel from launch until its waiter runs: a task in a loop, and a thread that blocks."""
    with closing(open_device(device)) as opened:
        stream, cell = opened.open_stream("wake"), torch.zeros(1, device=device)
        woken = anyio.run(_time_waits, stream, cell, rounds)
        blocked = []
        for _ in range(rounds):
            begin_s = time.perf_counter()
            stream.submit(lambda: cell.add_(1))
            stream.record().synchronize()
            blocked.append(time.perf_counter() - begin_s)
        launched = []
        for _ in range(rounds):
            begin_s = time.perf_counter()
            stream.submit(lambda: cell.add_(1))
            event = stream.record()
            launched.append(time.perf_counter() - begin_s)
            event.synchronize()
        cpu_share = anyio.run(_cpu_share, stream, device)
    return {
        **_percentiles("wait", woken),
        **_percentiles("synchronize", blocked),
        **_percentiles("launch", launched),
        "waiting_cpu_percent": 100 * cpu_share,
    }


def measure_digest(device: str, *, nbytes: int, rounds: int) -> dict[str, float]:
    """A digest of one large tensor, and of its bytes in many parts, against a copy of them on the device."""
    clock, found = Clock(device), dict[str, float]()
    nbytes = nbytes if clock.is_gpu else min(nbytes, 2**16)  # torch takes long for it
    tensor = torch.ones(nbytes // 2, dtype=torch.bfloat16, device=device)
    copied_s = statistics.median(clock.device_s(tensor.clone) for _ in range(rounds))
    for name, num_parts in (("whole", 1), ("many", 10_000 if clock.is_gpu else 10)):
        size = tensor.numel() // num_parts
        places = [Strided(at, (1,)) for at in range(0, size * num_parts, size)]
        parts = [Part("", "w", "p", (size,), place, place, "bfloat16") for place in places]
        begin_s = time.perf_counter()
        digester = Digester(parts, {"p": tensor})
        found[f"{name}_build_ms"] = 1e3 * (time.perf_counter() - begin_s)
        took_s = statistics.median(clock.device_s(digester.run) for _ in range(rounds))
        found[f"{name}_gb_per_s"] = nbytes / took_s / 1e9
        found[f"{name}_to_copy_ratio"] = took_s / copied_s
    return found


async def _time_waits(stream: Stream, cell: torch.Tensor, rounds: int) -> list[float]:
    found = []
    for _ in range(rounds + 20):
        begin_s = time.perf_counter()
        stream.submit(lambda: cell.add_(1))
        await stream.record().wait()
        found.append(time.perf_counter() - begin_s)
    return found[20:]


async def _cpu_share(stream: Stream, device: str) -> float:
    """The part of a core that a wait for long work takes."""
    if device.startswith("cuda"):
        stream.submit(lambda: torch.cuda._sleep(SPIN_CYCLES))
    else:
        stream.submit(lambda: time.sleep(0.1))
    event = stream.record()
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    await event.wait()
    return (time.process_time() - cpu_s) / (time.perf_counter() - begin_s)


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        f"{name}_p50_us": 1e6 * statistics.median(ordered),
        f"{name}_p99_us": 1e6 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }
