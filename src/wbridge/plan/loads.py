"""loads: the bytes of one version that decide how long it takes, whatever the mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from wbridge.errors import ConfigError
from wbridge.plan.explain import Explanation, Link, SlotMemory


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What one version moves. Each number of bytes is the largest of its kind: the slowest decides."""

    num_trainers: int
    num_engines: int
    num_rollouts: int
    """Workers of all engines."""
    shard_nbytes: int
    """What one trainer copies for a snapshot."""
    egress_nbytes: int
    """What one trainer sends, to anybody."""
    ingress_nbytes: int
    """What one rollout worker receives."""
    local_nbytes: int
    """Of what one trainer sends, the part for rollouts of its own host."""
    link_nbytes: int
    """What passes the busiest link of a host in one direction."""
    slot_nbytes: int
    """The largest group of a receiver."""
    num_outgoing: int
    """Pieces that one trainer writes."""
    num_incoming: int
    """Pieces that one rollout worker receives."""

    def __post_init__(self) -> None:
        for name in ("num_trainers", "num_engines", "num_rollouts", "ingress_nbytes", "slot_nbytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1")

    @property
    def num_groups(self) -> int:
        """Slots that hold a whole version."""
        return -(-self.ingress_nbytes // self.slot_nbytes)


def even_load(
    *,
    model_nbytes: int,
    num_trainers: int,
    num_engines: int,
    workers_per_engine: int,
    slot_nbytes: int,
    trainers_per_host: int = 0,
    engines_per_host: int = 1,
) -> Load:
    """The load of a job whose sides share no host and split the model evenly: each trainer has something
    for each rollout worker.

    `trainers_per_host` 0: all on one.
    """
    for name, count in (
        ("num_trainers", num_trainers),
        ("num_engines", num_engines),
        ("workers_per_engine", workers_per_engine),
    ):
        if count < 1:
            raise ConfigError(f"{name} = {count}: must be at least 1")
    num_rollouts = num_engines * workers_per_engine
    egress_nbytes = -(-model_nbytes * num_engines // num_trainers)
    ingress_nbytes = -(-model_nbytes // workers_per_engine)
    slot_nbytes = max(1, min(slot_nbytes, ingress_nbytes))
    num_groups = -(-ingress_nbytes // slot_nbytes)
    return Load(
        num_trainers=num_trainers,
        num_engines=num_engines,
        num_rollouts=num_rollouts,
        shard_nbytes=-(-model_nbytes // num_trainers),
        egress_nbytes=egress_nbytes,
        ingress_nbytes=ingress_nbytes,
        local_nbytes=0,
        link_nbytes=max(
            egress_nbytes * min(trainers_per_host or num_trainers, num_trainers),
            model_nbytes * min(engines_per_host, num_engines),
        ),
        slot_nbytes=slot_nbytes,
        num_outgoing=num_groups * num_rollouts,
        num_incoming=num_groups * num_trainers,
    )


def load_of(explanation: Explanation, *, trainers_per_host: int = 1) -> Load:
    """The load of a plan. An explanation names no trainer's host, so each holds `trainers_per_host` of
    those that send most.

    Raises:
        ConfigError: the plan moves nothing.
    """
    if not explanation.links:
        raise ConfigError("the plan moves nothing; explain one of trainers and rollouts that share tensors")
    rollouts = sorted({link.receiver for link in explanation.links})
    crossing = [link for link in explanation.links if link.crosses_hosts]
    local = [link for link in explanation.links if not link.crosses_hosts]
    egress = sorted(_sums(crossing, writers=True).values(), reverse=True)
    memory = {use.worker: use for use in explanation.memory}
    trainers = [memory[name] for name in explanation.egress_nbytes]
    return Load(
        num_trainers=len(trainers),
        num_engines=len({name.partition("[")[0] for name in rollouts}),
        num_rollouts=len(rollouts),
        shard_nbytes=max(use.pinned_nbytes // use.pinned_slots for use in trainers),
        egress_nbytes=max(explanation.egress_nbytes.values()),
        ingress_nbytes=max(_sums(explanation.links, writers=False).values()),
        local_nbytes=max(_sums(local, writers=True).values(), default=0),
        link_nbytes=max(
            sum(egress[:trainers_per_host]),
            max(explanation.ingress_nbytes.values()) if crossing else 0,
        ),
        slot_nbytes=max(memory[name].slot_nbytes for name in rollouts),
        num_outgoing=max(_counts(explanation, memory, writers=True).values()),
        num_incoming=max(_counts(explanation, memory, writers=False).values()),
    )


def _counts(
    explanation: Explanation, memory: Mapping[str, SlotMemory], *, writers: bool
) -> Mapping[str, int]:
    """Pieces by worker, if each link has a part in each group of its receiver."""
    found: dict[str, int] = {}
    for link in explanation.links:
        name = link.writer if writers else link.receiver
        found[name] = found.get(name, 0) + memory[link.receiver].num_groups
    return found


def _sums(links: Iterable[Link], *, writers: bool) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for link in links:
        name = link.writer if writers else link.receiver
        found[name] = found.get(name, 0) + link.nbytes
    return found
