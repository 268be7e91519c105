"""Links shared fairly, against rates and times worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wbridge.sim.fairness import Hops, fair_rates
from wbridge.sim.network import Network
from wbridge.sim.timeline import Server, Timeline


def over(*links: int) -> Hops:
    return tuple((link, 1) for link in links)


@pytest.mark.parametrize(
    ("capacities", "paths", "counts", "rates"),
    [
        ([10.0], [over(0)], [2], [5.0]),
        ([10.0], [over(0), over(0)], [1, 3], [2.5, 2.5]),
        ([1.0, 10.0], [over(0), over(0, 1), over(1)], [1, 1, 1], [0.5, 0.5, 9.5]),
        ([4.0, 10.0], [over(0, 1), over(1)], [2, 1], [2.0, 6.0]),
        ([12.0, 12.0], [((0, 3), (1, 1)), over(0)], [1, 1], [3.0, 3.0]),  # the first stands for three
        ([9.0, 2.0, 9.0], [over(0, 1), over(0), over(1, 2), over(2)], [1, 1, 1, 1], [1.0, 8.0, 1.0, 8.0]),
    ],
)
def test_rates_by_hand(
    capacities: list[float], paths: list[Hops], counts: list[int], rates: list[float]
) -> None:
    assert fair_rates(capacities, paths, counts) == pytest.approx(rates)


links = st.integers(0, 4)
flows = st.lists(st.tuples(st.sets(links, min_size=1, max_size=3), st.integers(1, 3)), min_size=1, max_size=8)


@given(st.lists(st.floats(0.5, 50.0), min_size=5, max_size=5), flows)
def test_no_link_is_overloaded_and_each_flow_has_a_full_one_where_none_gets_more(
    capacities: list[float], drawn: list[tuple[set[int], int]]
) -> None:
    paths, counts = [over(*sorted(own)) for own, _ in drawn], [count for _, count in drawn]
    rates = fair_rates(capacities, paths, counts)
    load, most = [0.0] * 5, [0.0] * 5
    for hops, count, rate in zip(paths, counts, rates, strict=True):
        for link, _ in hops:
            load[link] += rate * count
            most[link] = max(most[link], rate)
    assert all(n <= capacity * (1 + 1e-9) for n, capacity in zip(load, capacities, strict=True))
    for hops, rate in zip(paths, rates, strict=True):
        assert any(
            load[link] >= capacities[link] * (1 - 1e-6) and rate >= most[link] * (1 - 1e-6)
            for link, _ in hops
        )


def ends(
    sends: list[tuple[float, int, Hops]], capacities: list[float], resolution_s: float = 0.0
) -> list[float]:
    """When flows end that begin at some time, with some bytes."""
    timeline = Timeline()
    network = Network(timeline, capacities, resolution_s=resolution_s)
    found = [0.0] * len(sends)

    def send(number: int, nbytes: int, hops: Hops) -> None:
        def done() -> None:
            found[number] = timeline.now

        network.send(hops, nbytes, done)

    for number, (begin_s, nbytes, hops) in enumerate(sends):
        timeline.at(begin_s, lambda number=number, nbytes=nbytes, hops=hops: send(number, nbytes, hops))
    timeline.run(lambda: False)
    return found


def test_flows_share_a_link_while_both_are_there() -> None:
    assert ends([(0, 10, over(0)), (0, 20, over(0))], [10.0]) == pytest.approx([2.0, 3.0])
    assert ends([(0, 20, over(0)), (1, 5, over(0))], [10.0]) == pytest.approx([2.5, 2.0])


def test_a_link_that_becomes_free_is_used_by_the_rest() -> None:
    first, second = ends([(0, 10, over(0, 1)), (0, 30, over(1))], [5.0, 20.0])
    assert first == pytest.approx(2.0)  # 5 of 20 all the time
    assert second == pytest.approx(2.0)  # 15 of 20, as long as the other
    assert ends([(0, 10, over(0)), (4, 10, over(0))], [10.0]) == pytest.approx([1.0, 5.0])


def test_late_and_fast_flows_end_though_what_is_left_takes_less_than_time_can_tell() -> None:
    begins_s = [1e5 + k / 7 for k in range(20)]
    found = ends([(begin_s, 65537, over(0)) for begin_s in begins_s], [450e9])
    assert found == pytest.approx([begin_s + 65537 / 450e9 for begin_s in begins_s], rel=0, abs=1e-10)


def test_a_resolution_moves_ends_by_no_more_than_itself() -> None:
    sends = [(0.1 * k, 7 + 3 * k, over(k % 2, 2)) for k in range(12)]
    exact, coarse = ends(sends, [10.0, 8.0, 15.0]), ends(sends, [10.0, 8.0, 15.0], 0.01)
    assert coarse == pytest.approx(exact, abs=0.05)
    assert coarse != exact


def test_a_server_does_one_thing_after_the_other() -> None:
    timeline, done = Timeline(), []
    server = Server(timeline)
    for name, duration_s in (("a", 2.0), ("b", 0.0), ("c", 1.0)):
        server.do(duration_s, lambda name=name: done.append((name, timeline.now)))
    assert timeline.run(lambda: len(done) == 2)
    assert not timeline.run(lambda: False)
    assert done == [("a", 2.0), ("b", 2.0), ("c", 3.0)]
