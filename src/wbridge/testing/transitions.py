"""The transitions of one update, as moments at which a test can act: kill a process, or stop it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal

import msgspec

from wbridge.engine.lockstep import Lockstep
from wbridge.engine.mailer import Mailer
from wbridge.engine.puts import Puts
from wbridge.engine.receive import ReceiveEngine
from wbridge.engine.relay import Relay
from wbridge.engine.scatters import Scatters
from wbridge.flow.actions import ToLeader
from wbridge.flow.messages import Announced, Commit, EngineOutcome, Hold, Landed, Offer, Retired, Serve
from wbridge.flow.tickets import Tickets
from wbridge.plan.routes import iter_hops
from wbridge.session.member import Member
from wbridge.session.rollout import Rollout
from wbridge.session.sending import SendingEpoch

Transition = Literal[
    "announced",
    "offered",
    "granted",
    "first write",
    "half landed",
    "landed",
    "held",
    "committed",
    "applying",
    "retired",
    "passing on",
    "half passed on",
]

Seat = Literal["coordinator", "trainer", "leader", "follower", "relay"]
"""Which process sees the transition; trainer rank 0 is both `coordinator`, where embedded, and `trainer`, and
a `relay` is the leader of its engine too."""

TRANSITIONS: Final[tuple[Transition, ...]] = (
    "announced",
    "offered",
    "granted",
    "first write",
    "half landed",
    "landed",
    "held",
    "committed",
    "applying",
    "retired",
)
"""In the order of an update. In `async` an engine offers before the announcement."""

OF_RELAYS: Final[tuple[Transition, ...]] = ("passing on", "half passed on")
"""What only a worker passes that passes weights on to others."""


class _Pass(msgspec.Struct, frozen=True):
    """The call that is the transition: the `count`th one for which `counts` holds.

    The method must be one that its callers look up when they call it.
    """

    owner: type
    method: str
    counts: Callable[[object], bool] = lambda _: True
    count: Callable[[Any], int] = lambda _: 1  # Any: the object whose method it is


def _is(kind: type) -> Callable[[object], bool]:
    return lambda argument: isinstance(argument, kind)


def _is_landed(message: object) -> bool:
    return isinstance(message, EngineOutcome) and message.outcome == "landed"


def _tell_landed(actions: Any) -> bool:  # Any: the list that the ring returned
    return any(isinstance(action, ToLeader) and isinstance(action.message, Landed) for action in actions)


def _half_that_comes(engine: Any) -> int:  # Any: it is asked for what it keeps to itself
    return max(1, sum(len(group.pieces) for group in engine._groups) // 2)


def _half_that_goes(puts: Any) -> int:  # Any: as above
    plan = puts._context.plan
    engines = {member.group for exchange in plan.exchanges for member in exchange.members}
    relayed = {(hop.receiver, hop.received) for hop in iter_hops(plan.exchanges, engines)}
    return max(1, sum((out.receiver, out.group_index) not in relayed for out in plan.outgoing) // 2)


def _half_that_is_passed_on(relay: Any) -> int:  # Any: as above
    owed = relay._by_ticket[relay._ticket].receivers
    return max(1, sum(len(own) * len(relay._groups[group].pieces) for group, own in owed.items()) // 2)


_COORDINATOR: Final[Mapping[Transition, _Pass]] = {
    "announced": _Pass(Tickets, "_announce"),
    "offered": _Pass(Tickets, "offer"),
    "granted": _Pass(Tickets, "_serve"),
    "landed": _Pass(Tickets, "landed"),
}
_TRAINER: Final[Mapping[Transition, _Pass]] = {
    "announced": _Pass(SendingEpoch, "receive", _is(Announced)),
    "granted": _Pass(SendingEpoch, "receive", _is(Serve)),
    "first write": _Pass(Mailer, "_gather"),
    "half landed": _Pass(Puts, "_start", count=_half_that_goes),
    "landed": _Pass(SendingEpoch, "receive", _is_landed),
    "retired": _Pass(SendingEpoch, "receive", _is(Retired)),
}
_FOLLOWER: Final[Mapping[Transition, _Pass]] = {
    "granted": _Pass(Lockstep, "_to_worker", _is(Serve)),
    "first write": _Pass(ReceiveEngine, "arrived"),
    "half landed": _Pass(ReceiveEngine, "arrived", count=_half_that_comes),
    "landed": _Pass(ReceiveEngine, "_perform", _tell_landed),
    "held": _Pass(Lockstep, "_to_worker", _is(Hold)),
    "committed": _Pass(Lockstep, "_to_worker", _is(Commit)),
    "applying": _Pass(Scatters, "start", count=lambda _: 2),
}
_LEADER: Final[Mapping[Transition, _Pass]] = {
    "announced": _Pass(Rollout, "receive", _is(Announced)),
    "offered": _Pass(Member, "post", _is(Offer)),
    **_FOLLOWER,
}

_RELAY: Final[Mapping[Transition, _Pass]] = {
    **_LEADER,
    "passing on": _Pass(Relay, "_start"),
    "half passed on": _Pass(Relay, "_start", count=_half_that_is_passed_on),
}

SEEN: Final[Mapping[Seat, Mapping[Transition, _Pass]]] = {
    "coordinator": _COORDINATOR,
    "trainer": _TRAINER,
    "leader": _LEADER,
    "follower": _FOLLOWER,
    "relay": _RELAY,
}
"""The transitions that each kind of process passes itself; of the others it learns nothing, or later."""


@contextmanager
def acting_at(transition: Transition, seat: Seat, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` once, in the loop thread, when this process is next about to pass `transition` at `seat`.

    It acts for the whole process, whatever adapters live in it. Enter and leave while no update runs.

    Raises:
        KeyError: a process at `seat` does not see that transition.
    """
    seen = SEEN[seat][transition]
    original = getattr(seen.owner, seen.method)
    num_passed: dict[int, int] = {}
    has_acted = False

    @functools.wraps(original)
    def passing(self: object, *arguments: Any, **named: Any) -> Any:  # Any: whatever the method takes
        nonlocal has_acted
        if not has_acted and seen.counts(arguments[-1] if arguments else None):
            num_passed[id(self)] = num_passed.get(id(self), 0) + 1
            if num_passed[id(self)] == seen.count(self):
                has_acted = True
                act()
        return original(self, *arguments, **named)

    setattr(seen.owner, seen.method, passing)
    try:
        yield
    finally:
        setattr(seen.owner, seen.method, original)
