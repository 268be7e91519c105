"""Follower: one worker's part in the lockstep of its engine, the leader's own worker included.

The fast path of a poll is not here but in the caller's thread, on two plain attributes:

    follower.counter += 1          # first count,
    if not follower.flag:          # then read
        return None
    ...                            # hand over to the loop thread: follower.poll()

All methods run in the loop thread. It sets `flag` first and then reads `counter`, so a poll that begins
while a hold arrives is either counted in the promise or sees the flag.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from wbridge.flow.actions import (
    Apply,
    FollowerAction,
    Leave,
    PollFails,
    RunBeforeApply,
    StartHoldTimer,
    ToLeader,
    Unpark,
)
from wbridge.flow.messages import (
    Commit,
    Done,
    Hold,
    Meet,
    Promise,
    Ready,
    Refuse,
    Release,
    WithdrawHold,
    WorkerApplied,
)

LockstepMessage: TypeAlias = Hold | Meet | Commit | Done | Release


class Follower:
    """Answers the leader's holds. It lasts as long as the engine, over all epochs."""

    def __init__(self) -> None:
        self.counter: int = 0
        """Polls begun so far: the index of the newest one. The caller's thread alone counts it up."""
        self.flag: bool = False
        """A poll has something to do. Set and cleared in the loop thread alone."""
        self._hold = 0
        self._promised = 0
        self._meet: int | None = None
        self._parked = False
        self._waiting = False  # a poll with a waiting time, and no hold yet
        self._withdrawn = False
        self._stage: Literal["", "asked", "ready", "refused", "applying", "applied"] = ""
        self._commit: Commit | None = None
        self._fails: PollFails | None = None

    # Events of the caller's poll -----------------------------------------------------------------------

    def poll(self, *, wait: bool = False) -> list[FollowerAction]:
        """A poll that has been counted and has found the flag set, or that would wait for an update.

        It ends with `Unpark`, `Leave` or `PollFails`, now or later.
        """
        if self._fails is not None:
            return [self._fails]
        if not self._hold:
            self._waiting = wait
            return [] if wait else [Unpark()]
        if self.counter < (self._promised if self._meet is None else self._meet):
            return [Unpark()]
        return self._park()

    def wait_over(self) -> list[FollowerAction]:
        """The waiting time has passed. A poll that is held by now stays until the answer."""
        if not self._waiting:
            return []
        self._waiting = False
        return [Unpark()]

    def cancelled(self) -> list[FollowerAction]:
        """The caller cancelled its poll: ask the leader, and stay until the answer."""
        if self._waiting:
            self._waiting = False
            return [Unpark()]
        return self._withdraw("its poll was cancelled")

    def hold_timed_out(self, hold: int) -> list[FollowerAction]:
        """This worker has been parked for `hold_timeout_s`; it matters only before the commit."""
        return self._withdraw("parked for hold_timeout_s") if hold == self._hold else []

    def before_apply_done(self, hold: int) -> list[FollowerAction]:
        """The hook has run and agrees. From here to the answer this worker is in doubt."""
        if hold != self._hold or self._stage != "asked":
            return []
        self._stage = "ready"
        return [ToLeader(Ready(hold))]

    def refused(self, hold: int, reason: str) -> list[FollowerAction]:
        """The hook raised: nobody applies."""
        if hold != self._hold or self._stage != "asked":
            return []
        self._stage = "refused"
        return [ToLeader(Refuse(hold, reason))]

    def applied(
        self, hold: int, outcome: Literal["applied", "aborted", "tainted"], detail: str = ""
    ) -> list[FollowerAction]:
        """`Apply` has ended. `aborted`: not a byte was written; `tainted`: some were, or it failed midway."""
        if hold != self._hold or self._stage != "applying":
            return []
        self._stage = "applied"
        if self._fails is not None:  # the leader was lost meanwhile
            self._parked = False
            return [self._fails]
        return [ToLeader(WorkerApplied(hold, outcome, detail))]

    # Events of the engine-local connection ---------------------------------------------------------------

    def message(self, message: LockstepMessage) -> list[FollowerAction]:
        """A message of the leader. One of another hold is stale and dropped."""
        if self._fails is not None:
            return []
        if isinstance(message, Hold):
            return self._held(message.hold)
        if message.hold != self._hold:
            return []
        if isinstance(message, Meet):
            self._meet = message.index
            if not self._parked:
                return []
            if self.counter < message.index:
                self._parked = False
                return [Unpark()]
            return self._ask()
        if isinstance(message, Commit):
            assert self._stage == "ready", (
                f"commit of hold {message.hold} while {self._stage or 'not parked'}"
            )
            self._stage = "applying"
            self._commit = message
            return [Apply(message.hold, message.ticket, message.version)]
        if isinstance(message, Done):
            assert self._commit is not None and self._stage == "applied", "done before applied"
            commit = self._commit
            leave = Leave(commit.ticket, commit.version, message.outcome, commit.lag)
            self._forget_hold()
            return [leave]
        return self._released(message)

    def leader_lost(self, reason: str) -> list[FollowerAction]:
        """The engine is broken. In doubt (ready, and not released) means tainted."""
        if self._fails is not None:
            return []
        doubt = self._stage in ("ready", "applying", "applied")
        return self._fail(PollFails(reason, tainted=doubt))

    # Steps -------------------------------------------------------------------------------------------------

    def _held(self, hold: int) -> list[FollowerAction]:
        self._forget_hold()
        self._hold = hold
        self.flag = True  # before the counter is read
        if self._waiting:
            self._waiting = False
            self._promised = self.counter
            return [ToLeader(Promise(hold, self._promised)), *self._park()]
        self._promised = self.counter + 1
        return [ToLeader(Promise(hold, self._promised))]

    def _park(self) -> list[FollowerAction]:
        self._parked = True
        out: list[FollowerAction] = [StartHoldTimer(self._hold)]
        return out if self._meet is None else out + self._ask()

    def _ask(self) -> list[FollowerAction]:
        self._stage = "asked"
        return [RunBeforeApply(self._hold)]

    def _withdraw(self, reason: str) -> list[FollowerAction]:
        if not self._parked or self._withdrawn or self._stage in ("applying", "applied"):
            return []
        self._withdrawn = True
        return [ToLeader(WithdrawHold(self._hold, reason))]

    def _released(self, message: Release) -> list[FollowerAction]:
        parked = self._parked
        self._forget_hold()
        if message.protocol_error:
            self._parked = parked
            return self._fail(PollFails(message.reason, protocol_error=True))
        return [Unpark(message.reason)] if parked else []

    def _fail(self, fails: PollFails) -> list[FollowerAction]:
        self._fails = fails
        self.flag = True
        if self._stage == "applying" or not (self._parked or self._waiting):
            return []
        self._parked = self._waiting = False
        return [fails]

    def _forget_hold(self) -> None:
        self._hold = 0
        self._meet = None
        self._parked = self._withdrawn = False
        self._stage = ""
        self._commit = None
        self.flag = False
