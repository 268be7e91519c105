"""One version on virtual time: every byte once, no less time than the bound, and what must change it does."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.sim.jobs import CONFIG, FREE, LARGER, job, planned, simulated, slow
from wbridge.config import Config, Mode
from wbridge.errors import ConfigError
from wbridge.plan.describe import Group, Job
from wbridge.plan.expand import Expansion
from wbridge.plan.traffic import find_traffic
from wbridge.sim.baselines import broadcast, independent_fetch
from wbridge.sim.simulate import simulate
from wbridge.sim.speeds import Speeds

TWO = (Group(workers=2, tp=2, engines=2),)
MIXED = (Group(workers=2, tp=2, engines=2), Group(workers=1, engines=1))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("rollouts", [TWO, MIXED])
def test_every_byte_arrives_once_in_every_mode(rollouts: tuple[Group, ...], mode: Mode) -> None:
    config = msgspec.structs.replace(CONFIG, mode=mode)
    plan, _ = planned(job(rollouts))
    needed = {
        str(plan.workers[k]): nbytes for k, nbytes in find_traffic(plan, Expansion(plan)).ingress().items()
    }
    found = simulated(job(rollouts), config=config, fold="none")
    assert found.arrived_nbytes == needed
    sent = sum(link.nbytes for link in found.links if link.direction == "egress")
    got = sum(link.nbytes for link in found.links if link.direction == "ingress")
    assert sent == got
    assert found.num_simulated == found.num_workers


def test_a_single_rollout_takes_what_its_link_takes() -> None:
    """One trainer host and one worker: all bytes pass one NIC, and nothing else takes time."""
    found = simulated(job((Group(workers=1),), Group(workers=1)))
    (needed,) = found.needed_nbytes.values()
    assert found.bound.relayed_s == pytest.approx(needed / 1e7)
    assert found.time_s == pytest.approx(needed / 1e7)
    assert found.agst_s == found.trainer_stall_s == found.rollout_stall_s == pytest.approx(found.time_s)


def test_latency_and_messages_cost_what_they_cost() -> None:
    """One group of one piece: offer, report and grant are inside hosts or across; then credit, put and
    notification."""
    config = Config(slot_nbytes=2**30)
    one = job((Group(workers=1),), Group(workers=1))
    base = simulated(one, config=config)
    assert base.num_puts == 1
    far = simulated(one, msgspec.structs.replace(FREE, latency_s=0.5), config)
    # offer -> coordinator, grant -> leader, credit -> writer, notification -> reader
    assert far.time_s - base.time_s == pytest.approx(4 * 0.5)
    busy = simulated(one, msgspec.structs.replace(FREE, message_s=0.25), config)
    # credit at both ends, the put at the writer, the notification at the reader
    assert busy.time_s - base.time_s == pytest.approx(4 * 0.25)
    copied = simulated(one, msgspec.structs.replace(FREE, copy_gb_s=0.01), config)
    (needed,) = base.needed_nbytes.values()
    assert copied.time_s - base.time_s == pytest.approx(2 * needed / 1e7)  # gathered, then scattered


@pytest.mark.parametrize("rollouts", [TWO, MIXED, (Group(workers=4, tp=4, engines=3),)])
def test_no_version_beats_the_bound(rollouts: tuple[Group, ...]) -> None:
    assert simulated(job(rollouts)).time_over_bound >= 1 - 1e-9


def test_it_is_the_same_every_time() -> None:
    speeds = Speeds(latency_s=1e-4, message_s=1e-5)
    assert simulated(job(MIXED), speeds) == simulated(job(MIXED), speeds)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([TWO, MIXED]), st.lists(st.floats(0.002, 0.5), min_size=2, max_size=2))
def test_faster_links_never_cost_time(rollouts: tuple[Group, ...], rates: list[float]) -> None:
    low, high = sorted(rates)
    slower, faster = (simulated(job(rollouts, nic_gb_s=rate)) for rate in (low, high))
    assert faster.time_s <= slower.time_s * (1 + 1e-9)
    assert slower.time_s / faster.time_s == pytest.approx(high / low)  # nothing else takes time


def test_a_slow_host_delays_all_in_sync() -> None:
    even, uneven = simulated(job(TWO)), simulated(job(TWO, links=slow("rollout-host001", 0.002)))
    assert uneven.time_s > 1.4 * even.time_s


def test_overlap_takes_the_transfer_out_of_the_stall() -> None:
    speeds = msgspec.structs.replace(FREE, copy_gb_s=1.0)
    found = {mode: simulated(job(TWO), speeds, msgspec.structs.replace(CONFIG, mode=mode)) for mode in Mode}
    assert found[Mode.SYNC].agst_s > 5 * found[Mode.ASYNC].agst_s
    assert found[Mode.SENDER_OVERLAP].trainer_stall_s < 0.1 * found[Mode.SYNC].trainer_stall_s
    assert found[Mode.RECEIVER_OVERLAP].rollout_stall_s < 0.1 * found[Mode.SYNC].rollout_stall_s


def test_deeper_rings_never_wait_longer() -> None:
    speeds = Speeds(latency_s=5e-3, message_s=0.0)
    times = [
        simulated(job(MIXED), speeds, msgspec.structs.replace(CONFIG, num_slots=n)).time_s for n in (1, 2, 8)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.1 * times[2]


@pytest.mark.parametrize("num_engines", [4, 5])
def test_a_connection_carries_one_put_after_the_other(num_engines: int) -> None:
    """What is gathered early waits for its turn: it takes nothing from the group before it."""
    config = Config(slot_nbytes=2**13, num_slots=12)
    plan, topology = planned(job((Group(workers=2, tp=2, engines=num_engines),)), config, LARGER)
    times = [
        simulate(plan, msgspec.structs.replace(config, local_slots=n), topology, FREE).time_s for n in (1, 4)
    ]
    assert times[1] <= times[0] * 1.001


FOLDED = [
    (job((Group(workers=2, tp=2, engines=4),)), 4),
    (job((Group(workers=2, tp=2, engines=4),), gpus_per_host=4), 4),  # two engines on one NIC
    (job((Group(workers=4, tp=4, engines=3),), nics_per_host=2), 6),
    (job((Group(workers=2, tp=2, engines=3), Group(workers=4, tp=4, ep=4, engines=2))), 8),
    (job((Group(workers=2, tp=2, engines=3),), links=slow("rollout-host001", 0.005)), 6),  # two kinds of NIC
    (job((Group(workers=1, engines=3),)), 4),  # one is alone on its host, so it is unlike the other two
]


@pytest.mark.parametrize(("described", "num_simulated"), FOLDED)
@pytest.mark.parametrize("speeds", [FREE, Speeds(latency_s=1e-3, message_s=0.0, copy_gb_s=0.1)])
def test_equal_engines_need_only_one_of_them(described: Job, num_simulated: int, speeds: Speeds) -> None:
    """What one engine stands for is what all of them do, simulated one by one."""
    config = msgspec.structs.replace(CONFIG, relays="off")
    short, full = (simulated(described, speeds, config, fold=fold) for fold in ("engines", "none"))
    assert short.num_simulated == num_simulated
    assert full.num_simulated == full.num_workers == short.num_workers
    assert short.num_puts == full.num_puts
    for name in ("time_s", "landed_s", "agst_s", "trainer_stall_s", "rollout_stall_s"):
        assert getattr(short, name) == pytest.approx(getattr(full, name), rel=0.01), name
    egress = [
        {link.link: link.nbytes for link in found.links if link.link.startswith("trainer")}
        for found in (short, full)
    ]
    assert egress[0] == egress[1]


COSTLY = Speeds(latency_s=1e-4, message_s=1e-5, copy_gb_s=0.1)
EIGHT = Group(workers=8, tp=4, ep=4)
RANKS = [
    job((Group(workers=4, tp=4, ep=4, engines=2),), EIGHT, gpus_per_host=4, nics_per_host=4),
    job((Group(workers=2, tp=2, ep=2, engines=4),), EIGHT, nics_per_host=2),
    job((Group(workers=4, tp=4, ep=4, engines=3),), EIGHT, nics_per_host=2),
]


@pytest.mark.parametrize(("described", "speeds"), [*zip(RANKS, (FREE, COSTLY, FREE), strict=True)])
def test_of_ranks_that_pass_on_the_same_one_tells_enough(described: Job, speeds: Speeds) -> None:
    config = Config(slot_nbytes=2**13)
    plan, topology = planned(described, config, LARGER)
    assert len(plan.exchanges) > 1
    short, full = (simulate(plan, config, topology, speeds, fold=fold) for fold in ("ranks", "none"))
    assert short.num_simulated < full.num_simulated == full.num_workers
    for name in ("time_s", "agst_s"):
        assert getattr(short, name) == pytest.approx(getattr(full, name), rel=0.05), name


def test_ranks_are_not_left_out_where_they_compete_for_the_trainers() -> None:
    four = job((Group(workers=4, tp=4, ep=4, engines=2),), Group(workers=4, tp=4, ep=4), nics_per_host=2)
    found = simulated(four, fold="ranks")
    assert found.num_simulated == found.num_workers


def test_rollouts_that_pass_on_spare_the_trainers() -> None:
    """Three engines on three hosts: trainers send one copy, and what hosts get beyond it is passed on."""
    described = job((Group(workers=2, tp=2, engines=3),))
    config = Config(slot_nbytes=2**13)
    relayed, direct = (
        simulated(described, config=msgspec.structs.replace(config, relays=relays), fold="none")
        for relays in ("auto", "off")
    )
    sent = [
        sum(link.nbytes for link in found.links if link.link.startswith("trainer"))
        for found in (relayed, direct)
    ]
    assert sent[1] > 3 * sent[0]  # without relays, each rank gets the norms
    assert relayed.needed_nbytes == relayed.arrived_nbytes
    assert sum(relayed.needed_nbytes.values()) == sum(direct.needed_nbytes.values())
    assert relayed.time_s < 0.5 * direct.time_s
    assert relayed.num_puts > direct.num_puts / 3


def test_a_broadcast_of_everything_and_fetches_from_the_first_holder() -> None:
    """By hand: two trainers on one host hold a half each; two rollout hosts with an engine each."""
    described = job(TWO, Group(workers=2, pp=2))
    plan, topology = planned(described)
    copy = sum(
        n
        for (_, k), n in find_traffic(plan, Expansion(plan)).pairs.items()
        if plan.workers[k].group == "engine0.000"
    )
    whole = sum(
        planned_class.num_tensors * cell.nbytes
        for planned_class in plan.classes
        for cell in planned_class.cells
    )
    told = broadcast(plan, topology, FREE)
    assert told.time_s == pytest.approx(whole / 1e7, rel=0.01)  # both chains pass one NIC
    assert told.agst_s == told.time_s
    fetched = independent_fetch(plan, topology, FREE)
    assert fetched.time_s == pytest.approx(2 * copy / 1e7, rel=0.01)
    assert fetched.agst_s <= fetched.time_s


def test_fetches_overload_the_first_of_two_holders() -> None:
    both = job((Group(workers=1, engines=2),), Group(workers=2), gpus_per_host=1)
    plan, topology = planned(both)
    ours = simulated(both)
    assert independent_fetch(plan, topology, FREE).time_s == pytest.approx(2 * ours.time_s, rel=0.05)


@pytest.mark.parametrize(
    ("field", "value"), [("latency_s", -1.0), ("message_s", -1.0), ("local_gb_s", 0.0), ("efficiency", 1.5)]
)
def test_speeds_are_checked(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        Speeds(**{field: value})
