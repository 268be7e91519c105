"""The native table against loops in Python: any strides, bad rows, many threads, and no GIL."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wbridge.native.extension import num_copy_threads, set_copy_threads, table_type, why_missing

pytestmark = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))


def address_of(memory: bytearray | memoryview) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def row(
    address: int, slot: int, item: int, loops: list[tuple[int, int, int]], slot_item: int = 0
) -> list[int]:
    """One copy; each loop is an extent and the strides in the parameter and in the slot, in bytes."""
    columns = [[loop[k] for loop in loops] for k in range(3)]
    return [address, slot, item, slot_item or item, len(loops), *columns[0], *columns[1], *columns[2]]


def iter_places(loops: list[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    for index in itertools.product(*(range(extent) for extent, _, _ in loops)):
        yield tuple(sum(i * loop[k] for i, loop in zip(index, loops, strict=True)) for k in (1, 2))


@st.composite
def copies(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """Loops whose places do not overlap, in any order, with gaps, backwards, or over one place again."""
    item = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 24]))
    extents = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 9, 17]), max_size=3))
    columns = []
    for _ in range(2):
        strides, step = [0] * len(extents), item
        for loop in draw(st.permutations(range(len(extents)))):
            step *= draw(st.integers(1, 2))
            strides[loop] = step * draw(st.sampled_from([1, -1]))
            step *= extents[loop] or 1
        columns.append(strides)
    return item, list(zip(extents, *columns, strict=True))


@pytest.mark.parametrize("into_slot", [True, False])
def test_what_goes_past_the_caches_arrives_wherever_it_begins_and_ends(into_slot: bool) -> None:
    draw = random.Random(1)
    sizes = [511, 512, 513, 8191, 8192, 16_383, 16_384, 70_000, 600_000]
    sizes += [draw.randrange(512, 40_000) for _ in range(450)]
    assert sum(sizes) > 8 * 2**20  # smaller tables stay in the caches
    room = 2 * sum(sizes)
    memories = [bytearray(draw.randbytes(room)) for _ in (0, 1)]
    wanted = bytearray(memories[into_slot])
    rows, places = array("q"), [0, 0]
    for size in sizes:
        places = [place + draw.randrange(130) for place in places]
        rows.extend(row(address_of(memories[0]) + places[0], places[1], 1, [(size, 1, 1)]))
        source, target = (places[0], places[1]) if into_slot else (places[1], places[0])
        wanted[target : target + size] = memories[not into_slot][source : source + size]
        places = [place + size for place in places]
    table_type()(rows, into_slot=into_slot).run(memories[1], 0)
    assert memories[into_slot] == wanted


@given(case=copies(), into_slot=st.booleans(), replicated=st.booleans())
def test_any_strides_are_copied_like_a_loop_would(case, into_slot: bool, replicated: bool) -> None:
    item, loops = case
    if replicated and loops:  # the source has one place for the whole of the first loop
        extent, inside, outside = loops[0]
        loops[0] = (extent, 0, outside) if into_slot else (extent, inside, 0)
    spans = [sum(max(extent - 1, 0) * abs(strides[k]) for extent, *strides in loops) + item for k in (0, 1)]
    starts = [-sum(max(extent - 1, 0) * min(strides[k], 0) for extent, *strides in loops) for k in (0, 1)]
    parameter, slot = (bytearray(random.Random(k).randbytes(spans[k])) for k in (0, 1))
    expected_parameter, expected_slot = bytearray(parameter), bytearray(slot)
    for inside, outside in iter_places(loops):
        at, place = starts[0] + inside, starts[1] + outside
        if into_slot:
            expected_slot[place : place + item] = parameter[at : at + item]
        else:
            expected_parameter[at : at + item] = slot[place : place + item]

    rows = row(address_of(parameter) + starts[0], starts[1], item, loops)
    table_type()(array("q", rows), into_slot=into_slot).run(slot, 0)

    assert slot == expected_slot
    assert parameter == expected_parameter


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([1, 2, 3], "cut short"),
        ([0, 0, 2, 2, 1, 5, 2], "cut short"),
        ([0, 0, 2, 2, -1], "-1 loops"),
        ([0, 0, 2, 2, 65], "65 loops"),
        ([0, 0, 0, 0, 0], "0 to 0 bytes"),
        ([0, 0, 2, 8, 0], "2 to 8 bytes"),
        ([0, 0, 2, 2, 1, -1, 2, 2], "negative extent"),
        ([0, 0, 2, 2, 1, 2**62, 2, 2], "64 bits"),
        ([0, 0, 2, 2, 1, 4, 2**62, 2], "64 bits"),
        ([0, 2**63 - 1, 2, 2, 0], "64 bits"),
    ],
)
def test_rows_that_make_no_sense_are_refused(rows: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table_type()(array("q", rows), into_slot=True)
    with pytest.raises(ValueError, match="64-bit integers"):
        table_type()(b"abc", into_slot=True)


@pytest.mark.parametrize("base", [-1, 9, 2**62, -(2**62)])
def test_a_copy_that_leaves_its_slot_is_refused_before_it_starts(base: int) -> None:
    memory, slot = bytearray(b"\1" * 8), bytearray(16)
    table = table_type()(array("q", row(address_of(memory), 0, 1, [(8, 1, 1)])), into_slot=True)
    with pytest.raises(IndexError, match=f"from byte {base} leave a slot of 16 bytes"):
        table.run(slot, base)
    assert slot == bytes(16)
    table.run(slot, 8)
    assert slot == bytes(8) + memory


def test_only_a_gather_needs_a_writable_slot() -> None:
    memory, slot = bytearray(4), b"abcd"
    rows = array("q", row(address_of(memory), 0, 1, [(4, 1, 1)]))
    table_type()(rows, into_slot=False).run(slot, 0)
    assert memory == slot
    with pytest.raises(BufferError):
        table_type()(rows, into_slot=True).run(slot, 0)


def test_an_empty_table_copies_nothing() -> None:
    table = table_type()(array("q"), into_slot=True)
    table.run(bytearray(0), 5)
    assert (table.nbytes, table.num_pieces) == (0, 0)


def test_large_copies_are_cut_and_counted() -> None:
    memory = bytearray(3 * 2**20)
    table = table_type()(array("q", row(address_of(memory), 0, 1, [(len(memory), 1, 1)])), into_slot=True)
    assert table.nbytes == len(memory)
    assert table.num_pieces > 1
    with pytest.raises(IndexError):
        table.run(bytearray(len(memory) - 1), 0)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_copies_from_many_threads_share_the_helpers(num_threads: int) -> None:
    """Every caller gets its own bytes, whoever copied them; a bound of one means no helper takes part."""
    before = num_copy_threads()
    set_copy_threads(num_threads)
    try:
        sources = [bytearray([k + 1]) * (4 * 2**20) for k in range(4)]
        slots = [bytearray(len(source)) for source in sources]
        tables = [
            table_type()(array("q", row(address_of(source), 0, 1, [(len(source), 1, 1)])), into_slot=True)
            for source in sources
        ]
        threads = [
            threading.Thread(target=lambda t=t, s=s: [t.run(s, 0) for _ in range(3)])
            for t, s in zip(tables, slots, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert slots == sources
    finally:
        set_copy_threads(before)
    with pytest.raises(ValueError, match="at least one thread"):
        set_copy_threads(0)


def test_a_copy_lets_other_python_threads_run() -> None:
    """With an endless switch interval a thread runs only when another gives the interpreter up."""
    memory = bytearray(16 * 2**20)
    slot = bytearray(len(memory))
    table = table_type()(array("q", row(address_of(memory), 0, 1, [(len(memory), 1, 1)])), into_slot=True)
    go, ran = threading.Event(), []
    other = threading.Thread(target=lambda: (go.wait(), ran.append(True)))
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        go.set()
        attempts = 0
        while not ran and attempts < 500:
            table.run(slot, 0)
            attempts += 1
        assert ran
    finally:
        sys.setswitchinterval(interval)
        other.join()


FORK = """
import os
from array import array
import ctypes
from wbridge.native.extension import table_type
memory, slot = bytearray(b"x") * (4 << 20), bytearray(4 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
table = table_type()(array("q", [address, 0, 1, 1, 1, len(memory), 1, 1]), into_slot=True)
table.run(slot, 0)
child = os.fork()
if child == 0:
    slot[:] = bytes(len(slot))
    table.run(slot, 0)
    os._exit(0 if slot == memory else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.process
def test_a_child_of_fork_copies_without_helpers() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=30)
