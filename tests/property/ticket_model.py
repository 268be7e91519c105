"""A job for the explorer: trainer ranks and engines around the product's `Tickets`.

A rank's bytes are known by the number of the call in which they were captured: weights change between
two calls. Ranks that have `entered` from an earlier epoch never send a version twice with other weights,
so there the version tells. Channels between ranks and coordinator are FIFO and slow; engines are next to
the coordinator, except with `slow_engines`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from wbridge.flow.actions import StartCallDeadline, StartDeadline, StartGrace, StartPatience, To
from wbridge.flow.messages import (
    Announced,
    CallAborted,
    EngineOutcome,
    Finished,
    Landed,
    Offer,
    OfferRefused,
    Overdue,
    Report,
    Retired,
    Serve,
    TicketAborted,
    TooLate,
    Waiting,
    WithdrawCall,
)
from wbridge.flow.tickets import Tickets


class Snapshots:
    """Which of a trainer's snapshots are held, by which send. A direct source is one snapshot."""

    def __init__(self, num: int) -> None:
        self._calls: list[int | None] = [None] * num
        self._tickets: dict[int, int] = {}  # ticket -> call

    @property
    def has_free(self) -> bool:
        return None in self._calls

    def holds(self, call: int) -> bool:
        """Some snapshot holds the source of `call`."""
        return call in self._calls

    def take(self, call: int) -> int | None:
        """Hold a free snapshot for `call` and return its index; None if there is none."""
        if None not in self._calls:
            return None
        index = self._calls.index(None)
        self._calls[index] = call
        return index

    def announced(self, call: int, ticket: int) -> int | None:
        """The call has become a ticket; return its snapshot."""
        if call not in self._calls:
            return None
        self._tickets[ticket] = call
        return self._calls.index(call)

    def free(self, ticket: int) -> int | None:
        """`FreeSource` came for this ticket; return the snapshot that is free now."""
        call = self._tickets.pop(ticket, None)
        return None if call is None else self.free_call(call)

    def free_call(self, call: int) -> int | None:
        """The call was aborted before it was announced, and nothing is being copied into its snapshot."""
        if call not in self._calls:
            return None
        index = self._calls.index(call)
        self._calls[index] = None
        return index


class Rank:
    """A trainer that sends versions 1..V; with one direct snapshot it stands in `send` until retirement."""

    def __init__(self, num_snapshots: int) -> None:
        self.call = 0
        self.version = 0
        self.phase = "training"  # training, wanting (a snapshot), sending (direct), withdrawing
        self.said_waiting = 0
        self.snapshots = Snapshots(num_snapshots)
        self.calls: dict[int, int] = {}  # announced ticket -> call
        self.captured: dict[int, int] = {}  # call -> what its bytes are known by
        self.serving: dict[int, set[str]] = {}  # ticket -> engines to write


class Engine:
    def __init__(self) -> None:
        self.mode = "idle"  # idle, offered, receiving, landed, lost
        self.offer = 0
        self.ticket = 0
        self.parts: dict[int, int] = {}  # rank -> call whose bytes it wrote
        self.committed = 0
        self.announced = 0
        self.answered = 0


class TicketWorld:
    def __init__(
        self,
        *,
        delivery: Any,
        sender_direct: bool = False,
        receiver_direct: bool = False,
        early: bool = False,
        num_snapshots: int = 1,
        num_ranks: int = 2,
        num_engines: int = 2,
        num_versions: int = 2,
        cancels: int = 0,
        engine_losses: int = 0,
        deadlines: int = 0,
        late_ranks: bool = False,
        optional_engine: bool = True,
        slow_engines: bool = False,
        entered: Sequence[tuple[int, int]] = (),
        tickets: type[Tickets] = Tickets,
    ) -> None:
        self.direct = sender_direct
        self.parked = receiver_direct and not early  # with early slots a version waits for the workers
        self.every = delivery == "every"
        self.num_versions = num_versions
        self.budget = {"cancel": cancels, "loss": engine_losses, "deadline": deadlines}
        self.faulty = bool(cancels or deadlines or late_ranks)
        self.late = late_ranks  # ranks other than 0 may make a call late, or never
        self.optional = optional_engine and not self.every
        self.slow = slow_engines
        names = [f"e{i}" for i in range(num_engines)]
        self.coordinator = tickets(
            num_ranks=num_ranks,
            engines=names,
            delivery=delivery,
            source_held=sender_direct,
            lands_when_parked=receiver_direct,
            num_calls=max((calls for calls, _ in entered), default=0),
        )
        self.ranks = [Rank(num_snapshots) for _ in range(num_ranks)]
        self.entered = bool(entered)  # in an earlier epoch: the last call and version of each rank
        for rank, (call, version) in zip(self.ranks, entered, strict=False):
            rank.call, rank.version = call, version
        self.engines = {name: Engine() for name in names}
        self.to_coordinator: list[list[Any]] = [[] for _ in range(num_ranks)]
        self.to_rank: list[list[Any]] = [[] for _ in range(num_ranks)]
        self.to_leader: dict[str, list[Any]] = {name: [] for name in names}
        self.from_leader: dict[str, list[Any]] = {name: [] for name in names}
        self.timers: set[tuple[str, int]] = set()
        self.graces: set[tuple[str, int]] = set()
        self.announced: dict[int, int] = {}  # ticket -> call
        self.finals: set[tuple[int, str]] = set()
        self.retired: set[int] = set()
        self.aborted: set[int] = set()
        self.fault = ""

    def bad(self) -> str:
        return self.fault

    # What can happen ----------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[Any, ...]]:
        for r, rank in enumerate(self.ranks):
            if rank.phase == "training" and rank.version < self.num_versions:
                env = "~" if r and self.late else ""
                yield f"{env}rank {r}: begins send {rank.call + 1}", "begin", r
            if rank.phase == "wanting":
                if rank.snapshots.has_free:
                    yield f"rank {r}: captures call {rank.call}", "capture", r
                elif rank.said_waiting < rank.call:
                    yield f"rank {r}: waits for a snapshot", "say_waiting", r
            if rank.phase in ("wanting", "sending") and self.budget["cancel"]:
                yield f"~rank {r}: send {rank.call} cancelled", "cancel", r
            if self.to_coordinator[r]:
                yield f"coordinator: {self.to_coordinator[r][0]} of rank {r}", "hear_rank", r
            if self.to_rank[r]:
                yield f"rank {r}: {self.to_rank[r][0]}", "tell_rank", r
            for ticket, engines in rank.serving.items():
                for name in sorted(engines):
                    if self.engines[name].mode != "lost" and self.engines[name].ticket == ticket:
                        yield f"rank {r}: writes ticket {ticket} to {name}", "write", r, ticket, name
        for kind, ticket in sorted(self.timers):
            if kind == "call":
                env = "" if any(rank.call < ticket for rank in self.ranks) else "~"  # it is only slow
                yield f"{env}deadline of call {ticket} passes", "fire", kind, ticket
            elif kind == "patience":
                yield f"patience of ticket {ticket} passes", "fire", kind, ticket
            elif self.budget["deadline"]:
                yield f"~deadline of ticket {ticket} passes", "fire", kind, ticket
        for name, served in sorted(self.graces):
            yield f"grace of {name} after ticket {served} passes", "end_grace", name, served
        for i, (name, engine) in enumerate(self.engines.items()):
            yield from self.engine_steps(name, engine, "~" if i and self.optional else "")

    def engine_steps(self, name: str, engine: Engine, env: str) -> Iterator[tuple[Any, ...]]:
        if self.from_leader[name]:
            yield f"coordinator: {self.from_leader[name][0]} of {name}", "hear_leader", name
        if self.to_leader[name]:
            yield f"{name}: {self.to_leader[name][0]}", "tell_leader", name
        if engine.mode == "lost":
            return
        if engine.mode == "idle" and (not self.parked or engine.announced > engine.answered):
            yield f"{env if self.parked else ''}{name}: offers", "offer", name
        if engine.mode == "landed":
            yield f"{env}{name}: commits ticket {engine.ticket}", "commit", name
        if self.budget["loss"] and name == "e1":
            yield f"~{name}: dies", "die", name

    # Ranks --------------------------------------------------------------------------------------------

    def begin(self, r: int) -> None:
        rank = self.ranks[r]
        if self.direct:  # the weights have changed since the last send
            for ticket, engines in rank.serving.items():
                if any(self.engines[name].ticket == ticket for name in engines):
                    self.fault = f"rank {r} changes weights that ticket {ticket} still reads"
            rank.snapshots.free_call(rank.call)
            rank.serving = {}
        rank.call += 1
        rank.version += 1
        rank.phase = "wanting"

    def capture(self, r: int) -> None:
        rank = self.ranks[r]
        assert rank.snapshots.take(rank.call) is not None
        rank.captured[rank.call] = rank.version if self.entered and not self.direct else rank.call
        rank.phase = "sending" if self.direct else "training"
        self.to_coordinator[r].append(Report(rank.call, rank.version))

    def say_waiting(self, r: int) -> None:
        self.ranks[r].said_waiting = self.ranks[r].call
        self.to_coordinator[r].append(Waiting(self.ranks[r].call))

    def cancel(self, r: int) -> None:
        self.budget["cancel"] -= 1
        self.ranks[r].phase = "withdrawing"
        self.to_coordinator[r].append(WithdrawCall(self.ranks[r].call))

    def tell_rank(self, r: int) -> None:
        rank, message = self.ranks[r], self.to_rank[r].pop(0)
        if isinstance(message, Announced):
            rank.calls[message.ticket] = message.call
            rank.snapshots.announced(message.call, message.ticket)
            rank.serving[message.ticket] = set()
        elif isinstance(message, Serve) and message.ticket in rank.serving:
            rank.serving[message.ticket] |= set(message.engines)
        elif isinstance(message, TicketAborted):
            rank.serving.get(message.ticket, set()).difference_update(message.engines)
            if message.everywhere and self.direct and rank.calls.get(message.ticket) == rank.call:
                self.sent_failed(rank)
        elif isinstance(message, Retired):
            # writes are atomic here, so the source is free at once (Outgoing is explored with the rings)
            if self.direct and rank.calls[message.ticket] == rank.call and rank.phase != "wanting":
                rank.phase = "training"
            rank.snapshots.free(message.ticket)
            rank.serving.pop(message.ticket, None)
            rank.calls.pop(message.ticket)
        elif isinstance(message, CallAborted):
            rank.snapshots.free_call(message.call)
            if message.call == rank.call and rank.phase != "training":
                self.sent_failed(rank, repeats=not message.missing)
        elif isinstance(message, TooLate) and rank.phase == "withdrawing" and message.call == rank.call:
            rank.phase = "training"

    def sent_failed(self, rank: Rank, *, repeats: bool = True) -> None:
        """`UpdateAborted`: with a direct source every rank is inside the send and repeats the version;
        `BarrierTimeout`: they go on with the next."""
        if rank.phase != "training":
            rank.phase = "training"
            rank.version -= self.direct and repeats

    def write(self, r: int, ticket: int, name: str) -> None:
        rank, engine = self.ranks[r], self.engines[name]
        rank.serving[ticket].discard(name)
        call = rank.calls[ticket]
        if not rank.snapshots.holds(call):
            self.fault = f"rank {r} has no source of ticket {ticket} served to {name}"
        engine.parts[r] = rank.captured.get(call, call)
        if engine.mode == "receiving" and len(engine.parts) == len(self.ranks):
            engine.mode = "landed"
            self.up(name, Landed(ticket))

    # Engines --------------------------------------------------------------------------------------------

    def offer(self, name: str) -> None:
        engine = self.engines[name]
        engine.mode = "offered"
        engine.offer += 1
        self.up(name, Offer(engine.offer, self.parked))

    def commit(self, name: str) -> None:
        engine = self.engines[name]
        calls = set(engine.parts.values())
        if len(calls) != 1:
            self.fault = f"{name} commits ticket {engine.ticket} torn: calls {engine.parts}"
        if engine.ticket <= engine.committed:
            self.fault = f"{name} commits {engine.ticket} after {engine.committed}"
        if self.every and not self.faulty and engine.ticket != engine.committed + 1:
            self.fault = f"every: {name} skips from {engine.committed} to {engine.ticket}"
        engine.committed = engine.ticket
        self.finish(name, "applied")

    def finish(self, name: str, outcome: Any) -> None:
        engine = self.engines[name]
        ticket, engine.ticket, engine.mode, engine.parts = engine.ticket, 0, "idle", {}
        self.up(name, Finished(ticket, outcome))

    def die(self, name: str) -> None:
        self.budget["loss"] -= 1
        self.engines[name] = Engine()
        self.engines[name].mode = "lost"
        self.to_leader[name], self.from_leader[name] = [], []
        self.act(self.coordinator.lose_engine(name))

    def tell_leader(self, name: str) -> None:
        engine, message = self.engines[name], self.to_leader[name].pop(0)
        if isinstance(message, Announced):
            engine.announced = message.ticket
        elif isinstance(message, Serve):
            if engine.mode != "offered":
                self.fault = f"{name} is served ticket {message.ticket} while {engine.mode}"
            engine.mode, engine.ticket, engine.answered = "receiving", message.ticket, message.ticket
        elif isinstance(message, OfferRefused):
            engine.mode, engine.answered = "idle", engine.announced
        elif isinstance(message, TicketAborted) and engine.ticket == message.ticket:
            self.finish(name, "aborted")

    def up(self, name: str, message: Any) -> None:
        self.from_leader[name].append(message)
        if not self.slow:
            self.hear_leader(name)

    # Coordinator ----------------------------------------------------------------------------------------

    def hear_leader(self, name: str) -> None:
        message = self.from_leader[name].pop(0)
        event = {Offer: "offer", Landed: "landed", Finished: "finished"}[type(message)]
        self.act(getattr(self.coordinator, event)(name, message))

    def hear_rank(self, r: int) -> None:
        message = self.to_coordinator[r].pop(0)
        event = {Report: "report", Waiting: "waiting", WithdrawCall: "withdraw"}[type(message)]
        self.act(getattr(self.coordinator, event)(r, message))

    def fire(self, kind: str, ticket: int) -> None:
        self.timers.discard((kind, ticket))
        if kind == "call":
            self.act(self.coordinator.call_deadline_passed(ticket))
        elif kind == "patience":
            self.act(self.coordinator.patience_passed(ticket))
        else:
            self.budget["deadline"] -= 1
            self.act(self.coordinator.update_deadline_passed(ticket))

    def end_grace(self, name: str, served: int) -> None:
        self.graces.discard((name, served))
        self.act(self.coordinator.grace_passed(name, served))

    def act(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, StartPatience):
                self.timers.add(("patience", action.ticket))
            elif isinstance(action, StartGrace):
                self.graces.add((action.engine, action.served))
            elif isinstance(action, StartCallDeadline):
                self.timers |= {("call", action.call)} if self.late else set()
            elif isinstance(action, StartDeadline):
                self.timers.add(("deadline", action.ticket))
            else:
                self.note(action)
                for kind, who in action.recipients:
                    if kind == "leader":
                        self.to_leader[who].append(action.message)
                        if not self.slow:
                            self.tell_leader(who)
                    elif not isinstance(action.message, EngineOutcome | Overdue):
                        self.to_rank[who].append(action.message)

    def note(self, action: To) -> None:
        message = action.message
        if isinstance(message, Announced):
            self.announced[message.ticket] = message.call
            self.timers.discard(("call", message.call))
        elif isinstance(message, CallAborted):
            self.timers.discard(("call", message.call))
        elif isinstance(message, EngineOutcome) and message.final:
            if (message.ticket, message.engine) in self.finals:
                self.fault = f"second final outcome: {message}"
            self.finals.add((message.ticket, message.engine))
        elif isinstance(message, Retired):
            if message.ticket in self.retired:
                self.fault = f"ticket {message.ticket} retires twice"
            self.retired.add(message.ticket)
            self.timers.discard(("deadline", message.ticket))
        elif isinstance(message, TicketAborted) and message.everywhere:
            self.aborted.add(message.ticket)

    def good_end(self) -> bool:
        """All sent, nothing under way; every live engine has the newest, or the newest takes no more."""
        newest = max(self.announced, default=0)
        if self.entered and not newest:
            return False
        if any(rank.phase != "training" for rank in self.ranks):
            return False
        if any(rank.version < self.num_versions for rank in self.ranks[: 1 if self.late else None]):
            return False
        if any(self.to_rank) or any(self.to_coordinator) or any(self.from_leader.values()):
            return False
        for i, (name, engine) in enumerate(self.engines.items()):
            if engine.mode == "lost" or (i and self.optional):
                continue
            if engine.mode in ("receiving", "landed") or (self.parked and engine.mode == "offered"):
                return False
            if (
                engine.committed != newest
                and newest not in self.retired
                and (newest, name) not in self.finals
            ):
                return False
        return True
