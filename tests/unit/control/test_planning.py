from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from tests.unit.control.job import rollout, source_map, trainer
from wbridge.config import Config
from wbridge.control import planning
from wbridge.control.membership import Joined
from wbridge.control.planning import build_planned, unpacked_slice
from wbridge.errors import PlanError, ProtocolError
from wbridge.ids import WorkerId
from wbridge.plan.tables import tabulate

WORKERS = (trainer(), rollout("e0"), rollout("e1"))


def joined(workers: tuple[WorkerId, ...] = WORKERS) -> dict[WorkerId, Joined]:
    found: dict[WorkerId, Joined] = {}
    for worker in workers:
        table = tabulate(source_map(worker))
        digest = hashlib.sha256(msgspec.msgpack.encode(table)).digest()
        found[worker] = Joined(table, digest, b"", "", 0.0, 0.0)
    return found


def hosts(host: str = "here") -> dict[WorkerId, str]:
    return dict.fromkeys(WORKERS, host)


def test_a_worker_unpacks_its_own_part_and_knows_its_partners() -> None:
    planned = build_planned(joined(), hosts(), Config())
    part = unpacked_slice(planned.plan, rollout("e0"))
    assert part.worker == rollout("e0")
    assert {piece.writer for group in part.incoming for piece in group.pieces} == {trainer()}
    assert planned.partners_of(trainer()) == tuple(sorted(WORKERS))
    with pytest.raises(ProtocolError, match="got a plan that it cannot read"):
        unpacked_slice(b"no plan", rollout("e0"))


def test_the_same_workers_are_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(cache_dir=str(tmp_path / "cache"))
    asked: list[object] = []
    plan_tables = planning.plan_tables
    monkeypatch.setattr(planning, "plan_tables", lambda *a: (asked.append(a), plan_tables(*a))[1])
    first = build_planned(joined(), hosts(), config)
    again = build_planned(dict(reversed(joined().items())), hosts(), config)
    assert (first, len(asked)) == (again, 1)
    for other in (
        (joined(), hosts("elsewhere"), config),
        (joined(), hosts(), msgspec.structs.replace(config, slot_nbytes=2**20)),
        (joined(), hosts(), Config()),
    ):
        build_planned(*other)
    assert len(asked) == 4
    monkeypatch.setattr(planning, "wbridge_version", lambda: "another")
    build_planned(joined(), hosts(), config)
    assert len(asked) == 5
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_a_damaged_entry_is_planned_again(tmp_path: Path) -> None:
    config = Config(cache_dir=str(tmp_path))
    first = build_planned(joined(), hosts(), config)
    (entry,) = tmp_path.iterdir()
    for content in (b"", entry.read_bytes()[:-1], hashlib.sha256(b"x").digest() + b"x"):
        entry.write_bytes(content)
        assert build_planned(joined(), hosts(), config) == first


def test_a_plan_too_large_to_send_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_PLAN_NBYTES", 10)
    with pytest.raises(PlanError, match=r"plan of 3 workers takes \d+ bytes, at most 10 .*`include`"):
        build_planned(joined(), hosts(), Config())
