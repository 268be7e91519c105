"""World: what the parts of a simulated job share."""

from __future__ import annotations

from collections.abc import Callable

from wbridge.config import Config
from wbridge.sim.fabric import Fabric
from wbridge.sim.network import Network
from wbridge.sim.speeds import Speeds
from wbridge.sim.timeline import Server, Timeline


class World:
    """One virtual time, one network, and for each worker an event loop and two copy engines: one gathers and
    scatters, the other reads what is passed on."""

    def __init__(self, fabric: Fabric, speeds: Speeds, config: Config, num_workers: int) -> None:
        self.timeline = Timeline()
        self.network = Network(self.timeline, fabric.capacities, resolution_s=speeds.resolution_s)
        self.fabric, self.speeds, self.config = fabric, speeds, config
        self._loops = [Server(self.timeline) for _ in range(num_workers)]
        self._copies = [Server(self.timeline) for _ in range(num_workers)]
        self._reads = [Server(self.timeline) for _ in range(num_workers)]

    def tell(self, one: int, other: int, call: Callable[[], None]) -> None:
        """Deliver a message of the control plane: `call` happens there."""
        self.timeline.after(self.fabric.latency_s(one, other), call)

    def send(self, one: int, other: int, call: Callable[[], None], *, times: int = 1) -> None:
        """Deliver a message of the data path, `times` of them: it costs its ends something too."""
        self.handle(one, lambda: self.tell(one, other, lambda: self.handle(other, call)), times=times)

    def handle(self, worker: int, call: Callable[[], None], *, times: int = 1) -> None:
        """Call when the event loop of `worker` has come to it."""
        self._loops[worker].do(times * self.speeds.message_s, call)

    def copy(self, worker: int, nbytes: int, call: Callable[[], None], *, passes_on: bool = False) -> None:
        """Call when `worker` has gathered or scattered so much, or read it to pass it on."""
        rate = self.speeds.copy_gb_s * 1e9
        (self._reads if passes_on else self._copies)[worker].do(nbytes / rate if rate else 0.0, call)
