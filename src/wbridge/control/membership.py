"""Who is there: identities, groups, completeness. Decides nothing about time and sends nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from wbridge.control.local import Lease
from wbridge.control.messages import Hello, MemberStatus
from wbridge.errors import ConfigError
from wbridge.ids import Role, WorkerId
from wbridge.plan.tables import MapTable

MAX_NAMED = 32
"""An error names at most this many missing workers of one group, and counts the others."""


class Joined(msgspec.Struct, frozen=True):
    """What a member contributes to a plan, and since when (loop time) and how long it waits for one."""

    table: MapTable
    digest: bytes
    transport_address: bytes
    lockstep_address: str
    since_s: float
    patience_s: float


class Member:
    """One connected worker. A worker that reconnects is another member."""

    def __init__(self, hello: Hello, lease: Lease) -> None:
        self.hello = hello
        self.lease = lease
        self.joined: Joined | None = None

    @property
    def worker(self) -> WorkerId:
        return self.hello.worker

    def __str__(self) -> str:
        return f"{self.worker} at {self.lease.remote} (host {self.hello.host!r})"


class Membership:
    """All members, by identity and by group."""

    def __init__(self) -> None:
        self._members: dict[WorkerId, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def __contains__(self, member: object) -> bool:
        return isinstance(member, Member) and self._members.get(member.worker) is member

    def check(self, member: Member) -> Member | None:
        """Check a newcomer's identity; return the member it replaces: an older connection of its process.

        Raises:
            ConfigError: the identity is taken by another process, or contradicts that of another member.
        """
        worker = member.worker
        holder = self._members.get(worker)
        if holder is not None and holder.hello.adapter_token != member.hello.adapter_token:
            raise ConfigError(
                f"{worker} is claimed twice: by {holder} and by {member};"
                " give every process its own group and mesh coordinate"
            )
        for other in self._members.values():
            _check_together(member, other)
        return holder

    def add(self, member: Member) -> None:
        """Add a member that passed `check`."""
        self._members[member.worker] = member

    def find_table(self, digest: bytes) -> MapTable | None:
        """Return the table that a member has described in the same bytes, as replicas of an engine do."""
        for member in self._members.values():
            if member.joined is not None and member.joined.digest == digest:
                return member.joined.table
        return None

    def remove(self, member: Member) -> bool:
        """Remove a member. False: it was not one any more."""
        if member not in self:
            return False
        del self._members[member.worker]
        return True

    def trainers(self) -> tuple[Member, ...] | None:
        """The trainer group in rank order, if it is complete and all have joined."""
        for (role, _), members in self._groups().items():
            if role == "trainer" and _complete(members):
                return members
        return None

    def engines(self) -> dict[str, tuple[Member, ...]]:
        """The complete engines by name, each in rank order."""
        return {
            group: members
            for (role, group), members in sorted(self._groups().items())
            if role == "rollout" and _complete(members)
        }

    def missing(self, num_engines: int) -> tuple[str, ...]:
        """Name who is missing for an epoch with `num_engines` engines, and in any incomplete group."""
        groups = self._groups()
        names: list[str] = []
        if not any(role == "trainer" for role, _ in groups):
            names.append("trainer group (nobody has connected)")
        for (role, group), members in sorted(groups.items(), reverse=True):
            if not _complete(members):
                names.extend(_missing_in(role, group, members))
        unseen = num_engines - sum(role == "rollout" for role, _ in groups)
        if unseen > 0:
            names.append(f"{unseen} of {num_engines} engines (nobody has connected)")
        return tuple(names)

    def status(self) -> tuple[MemberStatus, ...]:
        return tuple(
            MemberStatus(m.worker, m.lease.remote, m.hello.host, m.joined is not None)
            for _, m in sorted(self._members.items())
        )

    def _groups(self) -> dict[tuple[Role, str], tuple[Member, ...]]:
        groups: dict[tuple[Role, str], list[Member]] = {}
        for _, member in sorted(self._members.items()):
            groups.setdefault((member.worker.role, member.worker.group), []).append(member)
        return {key: tuple(members) for key, members in groups.items()}


def _complete(members: tuple[Member, ...]) -> bool:
    return len(members) == members[0].worker.group_size and all(m.joined is not None for m in members)


def _check_together(member: Member, other: Member) -> None:
    a, b = member.worker, other.worker
    if a.role == b.role == "trainer" and a.group != b.group:
        raise ConfigError(
            f"a job has one trainer group, but {member} names {a.group!r} and {other} names {b.group!r};"
            " use one name, or another rendezvous for another job"
        )
    if (a.role, a.group) == (b.role, b.group) and a.mesh_shape != b.mesh_shape:
        raise ConfigError(
            f"{a.role} group {a.group!r} has two meshes: {a.mesh_shape} says {member}, {b.mesh_shape} says"
            f" {other}; give each engine its own name and each worker of it the same mesh"
        )


def _missing_in(role: Role, group: str, members: tuple[Member, ...]) -> Iterator[str]:
    shape, size = members[0].worker.mesh_shape, members[0].worker.group_size
    present = {member.worker.rank for member in members}
    absent = (rank for rank in range(size) if rank not in present)
    for rank in itertools.islice(absent, MAX_NAMED):
        yield str(WorkerId(role, group, shape, _coordinate(rank, shape)))
    num_absent = size - len(members)
    if num_absent > MAX_NAMED:
        yield f"{num_absent - MAX_NAMED} more of {role}/{group}"
    for member in members:
        if member.joined is None:
            yield f"{member.worker} (connected, has not described its weights yet)"


def _coordinate(rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    coordinate: list[int] = []
    for extent in reversed(shape):
        rank, c = divmod(rank, extent)
        coordinate.append(c)
    return tuple(reversed(coordinate))
