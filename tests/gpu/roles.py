"""A process: `python -m tests.gpu.roles ROLE URL MODE NUM_ENGINES DEVICE NUM_LAYERS MEMORY TRANSPORT`.

The memory is `shared` for parameters in shared memory, else `slots`.
"""

from __future__ import annotations

import sys

import torch

import wbridge.sync
from benchmarks.harness.model import rollout_target, trainer_source
from tests.gpu.model import is_exactly, load, values


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def trainer(url: str, config: dict[str, object], device: str, num_layers: int) -> None:
    """Send the version of each line, and overwrite the weights right after."""
    source, weights = trainer_source(0, 1, num_layers, device=device)
    with wbridge.sync.SenderAdapter(source, rendezvous=url, config=config) as sender:
        sender.connect()
        say("connected")
        for line in sys.stdin:
            load(weights, int(line))
            delivery = sender.send_weights(int(line))
            for tensor in weights.values():
                tensor.fill_(-7.0)
            say("sent", int(line), *sorted(delivery.applied().values()))


def engine(url: str, config: dict[str, object], device: str, num_layers: int, *, shared: bool) -> None:
    """Take every version and say whether it is whole; in `async`, only when told."""
    target, parameters = rollout_target("victim", 0, 1, num_layers, device=device)
    if shared:
        wbridge.share_memory(parameters.values())
    with wbridge.sync.ReceiverAdapter(target, rendezvous=url, config=config) as receiver:
        receiver.connect()
        say("connected")
        if config["mode"] == "async":
            sys.stdin.read()
        while True:
            if update := receiver.poll_requests(wait_s=60.0):
                say("applied", update.version, is_exactly(parameters, update.version))


if __name__ == "__main__":
    torch.set_num_threads(1)
    role, url, mode, num_engines, device, num_layers, shared, transport = sys.argv[1:]
    config = values(mode, int(num_engines), relay_patience_s=0.05, transport=transport)
    if role == "trainer":
        trainer(url, config, device, int(num_layers))
    else:
        engine(url, config, device, int(num_layers), shared=shared == "shared")
