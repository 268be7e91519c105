from __future__ import annotations

import pytest

from wbridge.plan.level import Set, level


def times(amounts: dict[Set, float], widths: list[float]) -> list[float]:
    """Return how long each link is busy, and check that nothing is lost."""
    flows = level(amounts, widths)
    loads = [0.0] * len(widths)
    for links, parts in flows.items():
        assert sum(parts) == pytest.approx(amounts[links])
        assert min(parts) >= 0
        for link, part in zip(links, parts, strict=True):
            loads[link] += part
    return [load / width for load, width in zip(loads, widths, strict=True)]


def test_sets_that_form_a_triangle_end_level() -> None:
    assert times({(0, 1): 300, (1, 2): 300, (0, 2): 0}, [1, 1, 1]) == pytest.approx([200] * 3, abs=1)


def test_a_wide_link_takes_more() -> None:
    assert times({(0, 1, 2): 600}, [1, 2, 3]) == pytest.approx([100] * 3)


def test_what_only_one_link_can_carry_is_made_up_for_by_the_others() -> None:
    assert times({(0,): 100, (0, 1): 100, (1, 2): 100}, [1, 1, 1]) == pytest.approx([100] * 3, abs=1)
    assert times({(0,): 900, (0, 1): 100}, [1, 1]) == pytest.approx([900, 100])


def test_equal_links_are_one_column_and_get_equal_parts() -> None:
    amounts: dict[Set, float] = {tuple(range(64)): 640.0, tuple(range(64, 128)): 64.0, (0,): 0.0}
    flows = level(amounts, [1.0] * 128)
    assert flows[tuple(range(64))] == pytest.approx([10.0] * 64)


def test_nothing_to_carry_is_ordinary() -> None:
    assert level({}, []) == {}
    assert level({(0, 1): 0.0}, [1.0, 1.0]) == {(0, 1): [0.0, 0.0]}
