"""The other process of a test: `python -m tests.gpu.memory_peer ROLE SOCKET`, a socketpair's descriptor.

`writer` opens memory that comes with a descriptor and fills it; `owner` allocates, sends the descriptor and
waits to be killed.
"""

from __future__ import annotations

import os
import socket
import sys

import torch

from wbridge.device.cuda import CudaDevice
from wbridge.device.memory import ExportedMemory

NBYTES = 5 * 2**20 + 123
"""No multiple of what the driver maps at a time."""
BUSY_CYCLES = 400_000_000
"""Some 0.2 s."""


def writer(peer: socket.socket) -> None:
    """Fill with 1, say so, and with 2 after a while; then wait."""
    _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
    device = CudaDevice(0)
    stream, buffer = device.open_stream("s"), device.adopt(ExportedMemory(descriptors[0], NBYTES))
    stream.submit(lambda: buffer.tensor.fill_(1))
    stream.record().synchronize()
    peer.send(b"1")
    stream.submit(lambda: torch.cuda._sleep(BUSY_CYCLES))
    stream.submit(lambda: buffer.tensor.fill_(2))
    peer.recv(1)


def owner(peer: socket.socket) -> None:
    buffer = CudaDevice(0).allocate(NBYTES, "device", shared=True)
    assert buffer.descriptor is not None
    socket.send_fds(peer, [b"d"], [buffer.descriptor])
    peer.recv(1)


if __name__ == "__main__":
    role, descriptor = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as peer:
        {"writer": writer, "owner": owner}[role](peer)
    os._exit(0)  # without the end of CUDA, which a killed process does not have either
