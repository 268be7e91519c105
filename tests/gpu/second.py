"""A process that works on the second GPU alone, and says which ones it has touched."""

from __future__ import annotations

import sys
from contextlib import closing

import anyio
import torch

from wbridge.device.copy import Block, build_gather, gather
from wbridge.device.cuda import CudaDevice


async def work() -> None:
    with closing(CudaDevice(1)) as device:
        tensors = {"p": torch.ones(2**16, device="cuda:1")}
        copies = build_gather([Block("p", (2**16,), 0, (1,), "float32", 0, (1,))], tensors)
        stream = device.open_stream("gather")
        stream.wait_event(device.current_stream().record())
        for kind in ("device", "pinned"):
            await gather(stream, copies, device.allocate(2**18, kind)).wait()
        stream.record().synchronize()


if __name__ == "__main__":
    anyio.run(work)
    touched = [torch._C._cuda_hasPrimaryContext(index) for index in range(2)]
    sys.stdout.write("only the second" if touched == [False, True] else str(touched))
