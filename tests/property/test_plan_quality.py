"""How good plans are: against the exact optimum, found by other means, for fleets of up to 32 workers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.test_plan import Job, jobs
from wbridge.config import Config
from wbridge.ids import WorkerId
from wbridge.plan.bound import Part as Needed
from wbridge.plan.bound import iter_parts, lower_bound
from wbridge.plan.build import build_plan, plan_tables
from wbridge.plan.expand import Expansion
from wbridge.plan.fleets import Fleet, Model, Parallelism, Part, build_fleet
from wbridge.plan.geometry import Geometry
from wbridge.plan.topology import Links, Nic, Topology, find_links
from wbridge.plan.traffic import between_links, find_traffic, loads_of
from wbridge.plan.types import Plan

TOY = Model(
    name="toy", num_layers=4, num_dense_layers=1, num_experts=16, hidden=1024, expert_hidden=512,
    dense_hidden=2048, num_heads=8, num_kv_heads=4, vocab=8192,
)  # fmt: skip
FAST, SLOW = Nic(50.0, 50.0), Nic(30.0, 20.0)
CONFIG = Config(slot_nbytes=2**20)

Fleets = tuple[Fleet, Topology, bool]
"""A fleet, its NICs, and whether all are equal and all engines alike."""


@st.composite
def fleets(draw: st.DrawFn) -> Fleets:
    meshes = (
        (8, Parallelism(pp=2, tp=2, ep=4)),
        (8, Parallelism(pp=2, tp=4)),
        (16, Parallelism(pp=2, tp=2, ep=8)),
        (8, Parallelism(fsdp=8)),
        (12, Parallelism(fsdp=4)),
        (3, Parallelism()),
    )
    size, mesh = draw(st.sampled_from(meshes))
    kinds = ((2, 1), (4, 1), (4, 4), (8, 8))
    engines = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=2, unique=True))
    parts = tuple(
        Part(
            workers_per_group=tp,
            num_groups=draw(st.integers(1, max(1, 16 // len(engines) // tp))),
            parallelism=Parallelism(tp=tp, ep=ep, fused=True),
        )
        for tp, ep in engines
    )
    fleet = build_fleet(TOY, Part(workers_per_group=size, parallelism=mesh), parts, gpus_per_host=4)
    hosts = sorted(set(fleet.hosts.values()))
    slow = draw(st.sampled_from((0, 0, 1, 2)))
    num_nics = draw(st.sampled_from((1, 2, 4)))
    nics = {host: (SLOW if k < slow else FAST,) * num_nics for k, host in enumerate(reversed(hosts))}
    return fleet, Topology(nics), slow == 0 and len(engines) == 1


def least_time(amounts: Mapping[tuple[int, ...], float], widths: Mapping[int, float]) -> float:
    """Return the least T in which links of these widths carry the amounts of all their sets.

    If a maximal flow leaves something behind, the sets that its minimal cut keeps and their links need
    longer; that is the next T. The last one is the maximum over all such subsets, hence exact.
    """
    amounts = {links: amount for links, amount in amounts.items() if amount > 0}
    if not amounts:
        return 0.0
    time = sum(amounts.values()) / sum(widths[k] for k in {k for links in amounts for k in links})
    while True:
        stuck = _unsaturated(amounts, {k: width * time for k, width in widths.items()})
        if not stuck:
            return time
        links = {k for own in stuck for k in own}
        longer = sum(amounts[own] for own in stuck) / sum(widths[k] for k in links)
        if longer <= time * (1 + 1e-9):
            return longer
        time = longer


def _unsaturated(
    amounts: Mapping[tuple[int, ...], float], capacities: Mapping[int, float]
) -> set[tuple[int, ...]]:
    """Push as much as fits along shortest augmenting paths; return the sets that could still push more."""
    least = 1e-9 * max(amounts.values())
    left, room = dict(amounts), dict(capacities)
    flow = {(own, k): 0.0 for own in amounts for k in own}
    while True:
        came_from: dict[object, object] = {own: None for own, rest in left.items() if rest > least}
        queue, end = deque(came_from), None
        while queue and end is None:
            node = queue.popleft()
            steps = (
                node
                if isinstance(node, tuple)
                else [own for own in amounts if node in own and flow[own, node] > least]
            )
            for step in steps:  # forward to a link, or back along what a set has pushed into it
                if step not in came_from:
                    came_from[step] = node
                    queue.append(step)
                    if not isinstance(step, tuple) and room[step] > least:
                        end = step
                        break
        if end is None:
            return {node for node in came_from if isinstance(node, tuple)}
        path = [end]
        while (before := came_from[path[-1]]) is not None:
            path.append(before)
        backward = [(path[i - 1], path[i]) for i in range(1, len(path)) if isinstance(path[i - 1], tuple)]
        pushed = min([left[path[-1]], room[end], *(flow[own, link] for own, link in backward)])
        for after, node in itertools.pairwise(path):
            if isinstance(node, tuple):
                flow[node, after] += pushed
            else:
                flow[after, node] -= pushed
        left[path[-1]] -= pushed
        room[end] -= pushed


def optimum(plan: Plan, links: Links) -> float:
    """Return the least time of one copy from trainers, one to each host, and what hosts must pass on."""
    egress_widths = {k: nic.egress_gb_s * 1e9 for k, nic in enumerate(links.nics)}
    held: dict[tuple[int, ...], float] = {}
    passed: dict[tuple[int, ...], float] = {}
    arriving: dict[tuple[int, ...], float] = {}
    for part in iter_parts(plan, Geometry()):
        _add(held, links, part.owners, part.nbytes)
        hosts = {plan.hosts[k] for k in part.receivers}
        _add(passed, links, part.receivers, part.nbytes * (len(hosts) - 1))
        for host in hosts:
            _add(arriving, links, [k for k in part.receivers if plan.hosts[k] == host], part.nbytes)
    ingress_widths = {k: nic.ingress_gb_s * 1e9 for k, nic in enumerate(links.nics)}
    return max(
        least_time(held, egress_widths),
        least_time(passed, egress_widths),
        least_time(arriving, ingress_widths),
    )


def _add(amounts: dict[tuple[int, ...], float], links: Links, workers: object, nbytes: float) -> None:
    own = tuple(sorted({links.of_worker[k] for k in workers}))  # type: ignore[attr-defined]  # of indices
    amounts[own] = amounts.get(own, 0.0) + nbytes


@settings(max_examples=25)
@given(fleets())
def test_the_bound_is_below_the_optimum_and_the_plan_is_near_it(drawn: Fleets) -> None:
    """What is written out, group by group, when all engines take a version together."""
    fleet, topology, uniform = drawn
    plan = plan_tables(fleet.tables, fleet.hosts, CONFIG, topology)
    links = find_links(plan.workers, plan.hosts, topology)
    copy_nbytes, bound = lower_bound(plan, links, Geometry())
    crossing = between_links(plan, find_traffic(plan, Expansion(plan)))
    busiest_s = max(load.seconds for load in loads_of(crossing.egress(), crossing.ingress(), links))
    best_s = optimum(plan, links)
    assert bound.relayed_s <= best_s * (1 + 1e-6)
    assert best_s * (1 - 1e-6) <= busiest_s <= best_s * (1.02 if uniform else 1.10)
    sent = sum(n for k, n in crossing.egress().items() if plan.workers[k].role == "trainer")
    assert sent == copy_nbytes
    arrived: dict[str, int] = {}
    for k, nbytes in crossing.ingress().items():
        arrived[plan.hosts[k]] = arrived.get(plan.hosts[k], 0) + nbytes
    assert arrived == needed_by_host(plan)  # each host receives each element once


def needed_by_host(plan: Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in iter_parts(plan, Geometry()):
        for host in {plan.hosts[k] for k in part.receivers}:
            found[host] = found.get(host, 0) + part.nbytes
    return found


@settings(max_examples=15)
@given(fleets())
def test_plans_without_relays_are_near_the_least_of_their_kind(drawn: Fleets) -> None:
    fleet, topology, uniform = drawn
    config = msgspec.structs.replace(CONFIG, relays="off")
    plan = plan_tables(fleet.tables, fleet.hosts, config, topology)
    links = find_links(plan.workers, plan.hosts, topology)
    widths = {k: nic.egress_gb_s * 1e9 for k, nic in enumerate(links.nics)}
    held: dict[tuple[int, ...], float] = {}
    for part in iter_parts(plan, Geometry()):
        _add(held, links, part.owners, part.nbytes * len(part.receivers))
    traffic = find_traffic(plan, Expansion(plan))
    assert sum(traffic.egress().values()) == sum(_received(part) for part in iter_parts(plan, Geometry()))
    busiest_s = max(load.seconds for load in loads_of(traffic.egress(), {}, links))
    assert busiest_s <= least_time(held, widths) * (1.02 if uniform else 1.10)
    bound = lower_bound(plan, links, Geometry())[1]
    assert max(
        load.seconds for load in loads_of(traffic.egress(), traffic.ingress(), links)
    ) >= bound.direct_s * (1 - 1e-9)


def _received(part: Needed) -> int:
    return part.nbytes * len(part.receivers)


@settings(max_examples=10)
@given(fleets())
def test_groups_fit_their_slots_and_are_the_same_bytes_for_all_that_share_them(drawn: Fleets) -> None:
    fleet, topology, _ = drawn
    plan = plan_tables(fleet.tables, fleet.hosts, CONFIG, topology)
    expansion = Expansion(plan)
    groups = {worker: expansion.groups_into(worker) for worker in plan.workers}
    for exchange in expansion.exchanges():
        for turn in range(len(exchange.sizes)):
            shared = [
                groups[member][own[turn]]
                for member, own in zip(exchange.members, exchange.numbers, strict=True)
            ]
            wires = {(g.nbytes, tuple((p.writer, p.offset, p.nbytes) for p in g.pieces)) for g in shared}
            assert len(wires) == 1
    for worker, own in groups.items():
        assert all(group.nbytes <= CONFIG.slot_nbytes for group in own)
        got = sum(piece.nbytes for group in own for piece in group.pieces)
        assert got == sum(part.nbytes for part in iter_parts(plan, Geometry()) if worker in _who(plan, part))


def _who(plan: Plan, part: Needed) -> set[WorkerId]:
    return {plan.workers[k] for k in part.receivers}


Cells = set[tuple[frozenset[int], frozenset[WorkerId], tuple[WorkerId, ...], str]]


@given(jobs())
def test_a_class_is_planned_as_each_of_its_tensors_would_be_alone(job: Job) -> None:
    maps, hosts, config = job
    whole = build_plan(maps, hosts, config)
    for planned in whole.classes:
        for tensor in planned.tensors():
            only = Config(slot_nbytes=config.slot_nbytes, include=(tensor,))
            alone = build_plan(maps, hosts, only)
            assert [one.tensors() for one in alone.classes] == [(tensor,)]
            assert _cells(alone, 0) == _cells(whole, whole.classes.index(planned))


def _cells(plan: Plan, number: int) -> Cells:
    found: Cells = set()
    for cell in plan.classes[number].cells:
        receivers = sorted(
            plan.workers[k]
            for table, _ in cell.needed
            for k, own in enumerate(plan.table_of)
            if own == table and plan.workers[k].role == "rollout"
        )
        elements = _elements(cell.region.extents, cell.region.source.offset, cell.region.source.strides)
        owners = frozenset(plan.workers[k] for k in cell.owners)
        found.add((frozenset(elements), owners, tuple(receivers), cell.wire_dtype))
    return found


def _elements(extents: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> list[int]:
    found = [offset]
    for extent, stride in zip(extents, strides, strict=True):
        found = [first + k * stride for first in found for k in range(extent)]
    return found
