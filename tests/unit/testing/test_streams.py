"""LoopDevice: work runs in order, not before somebody waits, and its errors reach the next event."""

from __future__ import annotations

import anyio
import pytest

from wbridge.errors import EndpointClosed
from wbridge.testing.clock import run_virtual
from wbridge.testing.streams import LoopDevice


def test_work_runs_when_waited_for_and_in_order() -> None:
    done: list[int] = []

    async def main() -> None:
        stream = LoopDevice().open_stream("s")
        stream.submit(lambda: done.append(1))
        first = stream.record()
        stream.submit(lambda: done.append(2))
        second = stream.record()
        await anyio.sleep(1.0)
        assert done == [] and not first.is_done()
        await first.wait()
        assert done == [1] and not second.is_done()
        await second.wait()
        assert done == [1, 2]

    run_virtual(main)


def test_a_cancelled_wait_leaves_the_work_to_run_later() -> None:
    done: list[int] = []

    async def main() -> None:
        stream = LoopDevice(delay_s=2.0).open_stream("s")
        stream.submit(lambda: done.append(1))
        event = stream.record()
        with anyio.move_on_after(1.0):
            await event.wait()
        assert done == []
        await anyio.sleep(2.0)
        assert done == [1] and event.is_done()

    run_virtual(main)


def test_a_stream_waits_for_the_event_of_another() -> None:
    done: list[str] = []

    async def main() -> None:
        device = LoopDevice()
        first, second = device.open_stream("first"), device.open_stream("second")
        first.submit(lambda: done.append("first"))
        second.wait_event(first.record())
        second.submit(lambda: done.append("second"))
        await second.record().wait()

    run_virtual(main)
    assert done == ["first", "second"]


def test_an_error_skips_work_up_to_the_next_event() -> None:
    done: list[int] = []

    async def main() -> None:
        stream = LoopDevice().open_stream("s")
        stream.submit(lambda: 1 // 0)  # type: ignore[arg-type]  # a result nobody sees
        stream.submit(lambda: done.append(1))
        failed = stream.record()
        stream.submit(lambda: done.append(2))
        with pytest.raises(ZeroDivisionError):
            await failed.wait()
        await stream.record().wait()

    run_virtual(main)
    assert done == [2]


def test_closing_runs_what_was_submitted_and_accepts_no_more() -> None:
    done: list[int] = []

    async def main() -> None:
        device = LoopDevice()
        stream = device.open_stream("s")
        stream.submit(lambda: done.append(1))
        device.close()
        assert done == [1] and device.num_open == device.num_pending == 0
        with pytest.raises(EndpointClosed, match="closed"):
            stream.submit(lambda: done.append(2))

    run_virtual(main)
