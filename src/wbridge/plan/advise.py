"""advise: what each mode would cost a job, computed from measured speeds. A model without I/O.

Times are means of a job in its steady state whose steps all take equally long. A poll comes at a random
moment of a rollout step, so an engine reaches it half a step after it was asked, and the last of n engines
n/(n+1) of a step. docs/explanation/modes.md says who waits for what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from wbridge.config import Config
from wbridge.errors import ConfigError
from wbridge.plan.loads import Load
from wbridge.plan.schedule import ring_slots

MODES: dict[str, tuple[bool, bool]] = {
    "sync": (False, False),
    "receiver_overlap": (False, True),
    "sender_overlap": (True, False),
    "async": (True, True),
}
"""By name: whether the trainers' and the rollouts' staging is pinned; the least demanding first."""

INDIFFERENCE = 0.01
"""Modes that keep the workers equally busy but for this part are equally good."""

GRANT_ROUNDS = 2
"""Round trips before the first byte: announce and offer, grant and credit."""

APPLY_ROUNDS = 2
"""Between the workers of an engine around an apply: ready and commit, applied and done."""

POLL_CHANGES = SEND_CHANGES = 2
"""From the caller's thread to the loop's, and back. That of the copies is measured with them."""


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """What the machines of a job can do. Of copies: one worker's share while its neighbours copy too."""

    snapshot_gb_s: float
    """From parameters into host memory."""
    apply_gb_s: float
    """From host memory into parameters."""
    device_gb_s: float
    """Between parameters and slots beside them."""
    host_gb_s: float
    """Inside host memory, also to another process of the host."""
    link_gb_s: float
    """One host's link to the others, in one direction, by the transport that the job uses."""
    checksum_gb_s: float = 0.0
    """Of what crosses hosts; 0: checksums are off."""
    round_s: float = 0.0005
    """A message to a peer and its answer."""
    change_s: float = 0.0001
    """From one thread of a worker to another one, which has to get a core first; of an engine's workers the
    slowest, since they wait for each other."""
    poll_s: float = 5e-6
    """A poll that finds nothing."""

    def __post_init__(self) -> None:
        for name in ("snapshot_gb_s", "apply_gb_s", "device_gb_s", "host_gb_s", "link_gb_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be positive")


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """How long both sides compute between two looks at us."""

    train_s: float
    rollout_s: float

    def __post_init__(self) -> None:
        for name in ("train_s", "rollout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be a positive number of seconds")


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One mode with one ring size."""

    name: str
    num_slots: int
    transfer_s: float
    """From the grant until all bytes are at all engines."""
    trainer_stall_s: float
    """Per version sent."""
    rollout_stall_s: float
    """Per version applied, with the polls that found nothing before it."""
    agst_s: float
    """Stall averaged over all workers, per version sent."""
    applied: float
    """Of the versions sent, the part that an engine applies; the others are superseded."""
    staleness_versions: float
    """Versions sent since the one in use, averaged over the time in which rollouts compute."""
    train_steps_per_s: float
    rollout_steps_per_s: float
    busy: float
    """The part of all workers' time in which they compute."""
    trainer_host_nbytes: int
    """Host memory of one trainer for snapshots."""
    rollout_host_nbytes: int
    """Host memory of one rollout worker for its ring."""


class Advice(msgspec.Struct, frozen=True):
    """All predictions, the name of the best, and why."""

    predictions: tuple[Prediction, ...]
    best: Prediction
    reason: str


def advise(
    load: Load,
    speeds: Speeds,
    steps: Steps,
    config: Config,
    *,
    ring_sizes: Sequence[int] = (0,),
    max_staleness: float = math.inf,
    max_host_nbytes: float = math.inf,
) -> Advice:
    """Predict every mode with every ring size, and choose.

    The best keeps the workers busiest among those within the limits; of equals, the one that needs least
    host memory and lags least.

    Raises:
        ConfigError: no mode is within the limits; `sync` always is, unless polls come too rarely.
    """
    found = tuple(
        predict(name, load, speeds, steps, config, num_slots=size) for name in MODES for size in ring_sizes
    )
    allowed = [
        p
        for p in found
        if p.staleness_versions <= max_staleness
        and max(p.trainer_host_nbytes, p.rollout_host_nbytes) <= max_host_nbytes
    ]
    if not allowed:
        least = min(found, key=lambda p: p.staleness_versions)
        raise ConfigError(
            f"no mode stays within {max_staleness} versions and {max_host_nbytes} bytes per worker; the least"
            f" stale is {least.name} with {least.staleness_versions:.2f}; raise a limit"
        )
    top = max(p.busy for p in allowed)
    best = next(p for p in allowed if p.busy >= top * (1 - INDIFFERENCE))
    return Advice(found, best, _reason(best, found, allowed))


def predict(
    name: str, load: Load, speeds: Speeds, steps: Steps, config: Config, *, num_slots: int = 0
) -> Prediction:
    """Predict one mode. `num_slots` 0: as in the settings."""
    case = _Case(name, load, speeds, steps, config, num_slots)
    trainer_stall_s = case.trainer_stall_s
    if case.trainer_pinned and config.delivery == "every":  # nothing is skipped: snapshots run out
        trainer_stall_s = max(trainer_stall_s, case.shortest_cycle_s - steps.train_s)
    period_s = steps.train_s + trainer_stall_s
    cycle_s = max(period_s, case.shortest_cycle_s) if case.trainer_pinned else period_s
    rollout_stall_s = case.update_stall_s + speeds.poll_s * cycle_s / steps.rollout_s
    applied = period_s / cycle_s
    stalls_s = load.num_trainers * trainer_stall_s + load.num_rollouts * rollout_stall_s * applied
    train_busy, rollout_busy = steps.train_s / period_s, max(0.0, 1 - rollout_stall_s / cycle_s)
    num_workers = load.num_trainers + load.num_rollouts
    return Prediction(
        name=name,
        num_slots=case.slots,
        transfer_s=case.transfer_s,
        trainer_stall_s=trainer_stall_s,
        rollout_stall_s=rollout_stall_s,
        agst_s=stalls_s / num_workers,
        applied=applied,
        staleness_versions=_mean_lag(
            case.used_s, case.used_s + cycle_s - rollout_stall_s, period_s, skips=applied < 1
        ),
        train_steps_per_s=1 / period_s,
        rollout_steps_per_s=rollout_busy / steps.rollout_s,
        busy=(load.num_trainers * train_busy + load.num_rollouts * rollout_busy) / num_workers,
        trainer_host_nbytes=config.snapshot_versions * load.shard_nbytes if case.trainer_pinned else 0,
        rollout_host_nbytes=case.slots * load.slot_nbytes if case.rollout_pinned else 0,
    )


class _Case:
    """The times of one mode with one ring size, each from what was computed before it."""

    def __init__(
        self, name: str, load: Load, speeds: Speeds, steps: Steps, config: Config, num_slots: int
    ) -> None:
        self._load, self._speeds, self._steps, self._config = load, speeds, steps, config
        self.trainer_pinned, self.rollout_pinned = MODES[name]
        wanted = msgspec.structs.replace(config, num_slots=num_slots or config.num_slots)
        self.slots = ring_slots(wanted, load.num_groups, "pinned" if self.rollout_pinned else "direct")
        self._holds_all = self.rollout_pinned and self.slots >= load.num_groups
        # Two threads have to get a core for an answer, however short the way is.
        round_s = max(speeds.round_s, 2 * speeds.change_s)
        self._grant_s = GRANT_ROUNDS * round_s
        self._commit_s = APPLY_ROUNDS * round_s + POLL_CHANGES * speeds.change_s
        scatter_s = load.ingress_nbytes / _per_s(speeds.device_gb_s)
        last_scatter_s = 0.0 if self.rollout_pinned else scatter_s / load.num_groups
        self.transfer_s = self._pipelined_s(0.0 if self.rollout_pinned else scatter_s) - last_scatter_s
        self._apply_s = (
            load.ingress_nbytes / _per_s(speeds.apply_gb_s) if self.rollout_pinned else last_scatter_s
        )
        self._mean_wait_s = steps.rollout_s / 2
        self._last_wait_s = steps.rollout_s * load.num_engines / (load.num_engines + 1)

    def _pipelined_s(self, scatter_s: float) -> float:
        """All bytes through the slowest stage, a first piece through those before and a last one through
        those behind it; longer if the slots are too few to keep that stage busy."""
        load, speeds = self._load, self._speeds
        summed = self._config.checksum
        local_sums = load.local_nbytes if summed == "auto" else 0
        sums_gb_s = 0.0 if summed == "off" else speeds.checksum_gb_s
        gather_gb_s = speeds.host_gb_s if self.trainer_pinned else speeds.device_gb_s
        prepare_s = load.egress_nbytes / _per_s(gather_gb_s)
        verify_s = 0.0
        if sums_gb_s and load.egress_nbytes > local_sums:
            prepare_s += (load.egress_nbytes - local_sums) / _per_s(sums_gb_s)
            verify_s = load.ingress_nbytes / _per_s(sums_gb_s)
        put_s = max(load.local_nbytes / _per_s(speeds.host_gb_s), load.link_nbytes / _per_s(speeds.link_gb_s))
        take_s = verify_s + scatter_s
        slowest_s = max(prepare_s, put_s, take_s)
        ends_s = prepare_s / load.num_outgoing + verify_s / load.num_incoming + scatter_s / load.num_groups
        sending_s = (prepare_s + put_s) / self._config.local_slots
        one_by_one_s = (prepare_s + put_s) / load.num_rollouts + take_s
        return max(slowest_s + ends_s, sending_s, one_by_one_s / self.slots)

    @property
    def _landed_s(self) -> float:
        """From the announcement until all bytes are at all engines. A direct engine has to park first, and
        a ring smaller than a version to be emptied at a poll."""
        return self._grant_s + (0.0 if self._holds_all else self._last_wait_s) + self.transfer_s

    @property
    def used_s(self) -> float:
        """From the announcement until the version is in use."""
        waited_s = self._mean_wait_s if self._holds_all else 0.0
        return self._landed_s + waited_s + self._apply_s + self._commit_s

    @property
    def update_stall_s(self) -> float:
        if self._holds_all:
            return self._apply_s + self._commit_s
        ring_part = self.slots / self._load.num_groups if self.rollout_pinned else 0.0
        patience_s = self._config.relay_patience_s
        if self.trainer_pinned:
            patience_s = max(patience_s, self.transfer_s)  # as long as a copy takes
        others_s = min(self._last_wait_s - self._mean_wait_s, patience_s)
        transfer_s = (1 - ring_part) * self.transfer_s
        return others_s + self._grant_s + transfer_s + self._apply_s + self._commit_s

    @property
    def trainer_stall_s(self) -> float:
        if self.trainer_pinned:
            # With two snapshots the newest version that nobody has taken gives way; with one it is in use.
            held_s = self._landed_s if self._config.snapshot_versions == 1 else 0.0
            snapshot_s = self._load.shard_nbytes / _per_s(self._speeds.snapshot_gb_s)
            snapshot_s += SEND_CHANGES * self._speeds.change_s
            return snapshot_s + max(0.0, held_s - self._steps.train_s)
        # An engine with a ring has room again when it has applied, which may be after the next announcement.
        busy_s = self._last_wait_s + self._apply_s if self.rollout_pinned else 0.0
        return max(0.0, busy_s - self._steps.train_s) + self._landed_s

    @property
    def shortest_cycle_s(self) -> float:
        """Between two versions of an engine that follows as fast as it can; a direct one makes a step."""
        return self.used_s if self._holds_all else self.update_stall_s + self._steps.rollout_s


def _mean_lag(start_s: float, stop_s: float, period_s: float, *, skips: bool) -> float:
    """How many versions were sent, on average over the time from `start_s` to `stop_s`, since one was
    announced at 0. An engine that skips takes a version at any moment after its announcement."""
    if skips:
        return (start_s + stop_s) / 2 / period_s
    if stop_s <= start_s:
        return float(start_s // period_s)

    def lag_until(time_s: float) -> float:
        sent = time_s // period_s
        return sent * time_s - period_s * sent * (sent + 1) / 2

    return (lag_until(stop_s) - lag_until(start_s)) / (stop_s - start_s)


def _reason(best: Prediction, found: Sequence[Prediction], allowed: Sequence[Prediction]) -> str:
    """Say what the best gains over the others, or that they gain nothing."""
    simplest = next((p for p in allowed if p.name == "sync"), found[0])
    rivals = [p for p in found if p.name != best.name]
    if best.name == "sync":
        rival = max(rivals, key=lambda p: p.busy)
        if rival.busy <= best.busy:
            return (
                f"copies into host memory cost more than the transfer that they hide: AGST"
                f" {_ms(best.agst_s)} against {_ms(rival.agst_s)} in {rival.name}"
            )
        return (
            f"workers compute {best.busy:.1%} of the time, and {rival.name} would add"
            f" {rival.busy - best.busy:.1%} for weights {rival.staleness_versions:.2f} versions old"
        )
    skipped = f", and engines skip {1 - best.applied:.0%} of the versions" if best.applied < 1 else ""
    return (
        f"workers compute {best.busy:.1%} of the time against {simplest.busy:.1%} in {simplest.name}, since a"
        f" transfer of {_ms(best.transfer_s)} runs beside the steps; weights are"
        f" {best.staleness_versions:.2f} versions old on average{skipped}"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _per_s(gb_s: float) -> float:
    return gb_s * 1e9
