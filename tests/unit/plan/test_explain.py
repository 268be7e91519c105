from __future__ import annotations

import msgspec
import pytest

from tests.unit.plan.world import MapBuilder, one_host, plan_of, rollout, rows, single, trainer
from wbridge.config import Config
from wbridge.ids import WorkerId
from wbridge.layout.source_map import SourceMap
from wbridge.plan.build import build_plan
from wbridge.plan.explain import Explanation, explain

SHAPE = (64, 8)  # 1024 bytes


def explained(maps: dict[WorkerId, SourceMap], hosts: dict[WorkerId, str], **settings: object) -> Explanation:
    config = Config(**settings)  # type: ignore[arg-type]  # settings by name
    return explain(build_plan(maps, hosts, config), config)


def sharded() -> dict[WorkerId, SourceMap]:
    maps = {trainer(r, 2): single("w", SHAPE, rows(SHAPE, r, 2)) for r in range(2)}
    return maps | {rollout(r, 4): single("w", SHAPE, rows(SHAPE, r % 2, 2)) for r in range(4)}


def test_bytes_by_trainer_host_and_link() -> None:
    maps = sharded()
    hosts = {worker: f"{worker.role}{worker.rank // 2}" for worker in maps}
    told = explained(maps, hosts, relays="off")
    assert told.egress_nbytes == {"trainer/train[0]": 1024, "trainer/train[1]": 1024}
    assert told.ingress_nbytes == {"rollout0": 1024, "rollout1": 1024}
    assert [(link.writer, link.receiver, link.nbytes) for link in told.links][:2] == [
        ("trainer/train[0]", "rollout/engine0[0]", 512),
        ("trainer/train[0]", "rollout/engine0[2]", 512),
    ]
    assert all(link.crosses_hosts for link in told.links)
    assert (told.needed_nbytes, told.sent_nbytes, told.model_nbytes, told.copies_sent) == (
        2048,
        2048,
        1024,
        2.0,
    )
    assert told.relayed_nbytes == 0


def test_bytes_that_rollouts_pass_on() -> None:
    """Ranks 0 and 2 need the same, on different hosts: trainers send it to one, which passes it on."""
    maps = sharded()
    hosts = {worker: f"{worker.role}{worker.rank // 2}" for worker in maps}
    told = explained(maps, hosts, slot_nbytes=128)
    assert told.egress_nbytes == {"trainer/train[0]": 512, "trainer/train[1]": 512}
    assert told.ingress_nbytes == {"rollout0": 1024, "rollout1": 1024}
    assert (told.needed_nbytes, told.sent_nbytes, told.relayed_nbytes) == (2048, 1024, 1024)
    assert (told.copies_sent, told.ratio) == (1.0, pytest.approx(1.0))
    passed = {(link.writer, link.receiver): link.nbytes for link in told.links if "rollout" in link.writer}
    assert passed == {
        (f"rollout/engine0[{a}]", f"rollout/engine0[{b}]"): 256 for a, b in ((0, 2), (2, 0), (1, 3), (3, 1))
    }

    together = explained(maps, {worker: worker.role for worker in maps})
    assert together.ingress_nbytes == {"rollout": 1024}  # what stays inside the host is not counted
    assert (together.relayed_nbytes, together.copies_sent) == (1024, 1.0)


def test_lower_bound_and_ratio() -> None:
    maps = sharded()
    hosts = {worker: f"{worker.role}{worker.rank // 2}" for worker in maps}
    told = explained(maps, hosts)
    least = {name: getattr(told.bound, name) * 1e9 for name in told.bound.__struct_fields__}
    assert least == pytest.approx(
        {
            "shared_egress_s": 512,
            "sole_holder_s": 512,
            "host_ingress_s": 1024,
            "relay_egress_s": 512,
            "direct_egress_s": 1024,
            "direct_ingress_s": 1024,
        }
    )
    assert (told.busiest_s * 1e9, told.ratio) == pytest.approx((1024, 1.0))
    assert explained(maps, one_host(maps)).ratio == pytest.approx(
        2.0
    )  # two copies into one host, one would do


def test_what_one_trainer_holds_alone_is_part_of_the_bound() -> None:
    maps = {
        trainer(0, 2): MapBuilder().whole("w", SHAPE).whole("v", SHAPE).build(),
        trainer(1, 2): MapBuilder().box("w", SHAPE, rows(SHAPE, 0, 2)).build(),
        rollout(0, 2): single("w", SHAPE, rows(SHAPE, 0, 1)),
        rollout(1, 2): single("v", SHAPE, rows(SHAPE, 0, 1)),
    }
    assert explained(maps, one_host(maps)).bound.sole_holder_s == pytest.approx((1024 + 512) / 1e9)


def test_slot_memory_in_both_stagings() -> None:
    maps = sharded()
    told = explained(maps, one_host(maps), slot_nbytes=64)
    uses = {use.worker: use for use in told.memory}
    ring, sender = uses["rollout/engine0[0]"], uses["trainer/train[0]"]
    assert (ring.num_groups, ring.slot_nbytes) == (8, 64)
    assert (ring.direct_slots, ring.direct_nbytes) == (4, 256)
    assert (ring.pinned_slots, ring.pinned_nbytes) == (8, 512)
    assert (sender.num_groups, sender.direct_slots, sender.direct_nbytes) == (16, 0, 0)
    assert (sender.pinned_slots, sender.pinned_nbytes) == (2, 2 * 512)


def test_a_trainer_keeps_gather_slots_for_each_receiver_on_another_host() -> None:
    maps = sharded()
    hosts = {worker: "far" if worker.role == "rollout" and worker.rank else "near" for worker in maps}
    uses = {use.worker: use for use in explained(maps, hosts, slot_nbytes=64).memory}
    assert (uses["trainer/train[0]"].direct_slots, uses["trainer/train[0]"].direct_nbytes) == (2, 128)
    assert (uses["trainer/train[1]"].direct_slots, uses["trainer/train[1]"].direct_nbytes) == (4, 256)


def test_a_ring_smaller_than_a_version_costs_overlap() -> None:
    maps = sharded()
    for num_slots, share in ((1, 1 / 8), (6, 6 / 8), (8, 1.0), (20, 1.0), (0, 1.0)):
        told = explained(maps, one_host(maps), slot_nbytes=64, num_slots=num_slots)
        uses = {use.worker: use for use in told.memory}
        ring, sender = uses["rollout/engine0[3]"], uses["trainer/train[1]"]
        assert ring.pinned_slots == (min(num_slots, 8) or 8)
        assert (ring.version_nbytes, ring.pinned_share) == (512, share)
        assert ring.lost_overlap_nbytes == 512 - share * 512
        assert (sender.version_nbytes, sender.pinned_share, sender.lost_overlap_nbytes) == (1024, 1.0, 0)
        lines = [line for line in told.to_text().splitlines() if line.startswith("overlap")]
        assert len(lines) == (4 if share < 1 else 0)
    text = explained(maps, one_host(maps), slot_nbytes=64, num_slots=6).to_text()
    assert "pinned slots take 75% of 512 B; the other 128 B move only while the engine is parked" in text


def test_unused_tensors_are_counted() -> None:
    maps = sharded()
    maps[trainer(0, 2)] = MapBuilder().box("w", SHAPE, rows(SHAPE, 0, 2)).whole("extra", (3,)).build()
    assert explained(maps, one_host(maps)).num_unused_tensors == 1


def test_text_and_json() -> None:
    maps = {
        trainer(0, 1): single("w", SHAPE, rows(SHAPE, 0, 1), dtype="float32"),
        rollout(0, 1): single("w", SHAPE, rows(SHAPE, 0, 1), dtype="bfloat16"),
    }
    told = explained(maps, one_host(maps))
    text = told.to_text()
    assert "needed 1.02 kB, sent 1.02 kB, 1.00 copies of 1.02 kB" in text
    assert "rollouts pass on 0 B" in text
    assert "float32 -> bfloat16 as bfloat16: 1.02 kB" in text
    assert "trainer/train[0] -> rollout/engine0[0]: 1.02 kB inside a host" in text
    assert msgspec.json.decode(msgspec.json.encode(told), type=Explanation) == told


def test_explaining_an_empty_plan() -> None:
    empty = SourceMap(checkpoint={}, parameters={}, mapped=())
    maps = {trainer(0, 1): empty, rollout(0, 1): empty}
    told = explain(plan_of(maps), Config())
    assert (told.sent_nbytes, told.ratio, told.copies_sent) == (0, 1.0, 0.0)
