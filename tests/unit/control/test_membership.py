from __future__ import annotations

from typing import cast

from tests.unit.control.job import rollout, source_map, trainer
from wbridge.control.local import LocalLease
from wbridge.control.membership import MAX_NAMED, Joined, Member, Membership
from wbridge.control.messages import Hello
from wbridge.ids import WorkerId
from wbridge.plan.tables import tabulate


class Elsewhere:
    """Stands in for a connection where only its name matters."""

    remote = "127.0.0.1:1"


def member(worker: WorkerId, *, joined: bool = True, token: str = "") -> Member:
    hello = Hello(worker, "host", token or str(worker), {})
    member = Member(hello, cast(LocalLease, Elsewhere()))  # cast: nothing is sent here
    if joined:
        member.joined = Joined(
            table=tabulate(source_map(worker)),
            digest=str(worker).encode(),
            transport_address=b"",
            lockstep_address="",
            since_s=0.0,
            patience_s=1.0,
        )
    return member


def membership(*members: Member) -> Membership:
    all_of_them = Membership()
    for one in members:
        all_of_them.check(one)
        all_of_them.add(one)
    return all_of_them


def test_groups_are_complete_when_all_have_joined_and_come_in_rank_order() -> None:
    engine = [member(WorkerId("rollout", "e0", (2, 2), (i, j))) for i in (1, 0) for j in (1, 0)]
    half = member(rollout("e1", 0, 2))
    silent = [member(trainer(0, 2)), member(trainer(1, 2), joined=False)]
    group = membership(*engine, half, *silent)

    assert group.trainers() is None
    assert list(group.engines()) == ["e0"]
    assert [m.worker.rank for m in group.engines()["e0"]] == [0, 1, 2, 3]

    silent[1].joined = silent[0].joined
    assert group.trainers() == tuple(silent)


def test_nobody_is_named_when_all_are_there() -> None:
    assert membership(member(trainer()), member(rollout("e0")), member(rollout("e1"))).missing(2) == ()


def test_missing_workers_are_named_by_coordinate_and_unseen_groups_are_counted() -> None:
    assert membership().missing(2) == (
        "trainer group (nobody has connected)",
        "2 of 2 engines (nobody has connected)",
    )
    partial = membership(
        member(WorkerId("trainer", "t", (2, 2), (0, 1))), member(rollout("e0", 1, 2), joined=False)
    )
    assert partial.missing(2) == (
        "trainer/t[0,0]",
        "trainer/t[1,0]",
        "trainer/t[1,1]",
        "rollout/e0[0]",
        "rollout/e0[1] (connected, has not described its weights yet)",
        "1 of 2 engines (nobody has connected)",
    )


def test_a_huge_mesh_is_counted_and_not_listed() -> None:
    names = membership(member(rollout("e0", 5, 10**9), joined=False), member(trainer())).missing(1)

    assert len(names) == MAX_NAMED + 2
    assert names[MAX_NAMED] == f"{10**9 - 1 - MAX_NAMED} more of rollout/e0"


def test_only_the_member_itself_can_be_removed() -> None:
    old, new = member(trainer(), token="same"), member(trainer(), token="same")
    group = membership(old)

    assert group.check(new) is old
    group.add(new)
    assert (old in group, new in group) == (False, True)
    assert not group.remove(old)
    assert group.remove(new)
    assert list(group) == []


def test_replicas_share_one_map() -> None:
    first = member(rollout("e0"))
    group = membership(first, member(rollout("e1"), joined=False))

    assert first.joined is not None
    assert group.find_table(first.joined.digest) is first.joined.table
    assert group.find_table(b"another") is None
