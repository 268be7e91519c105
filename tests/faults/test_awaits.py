"""Every await of sender, receiver and coordinator is cancelled once and fails once, and the job survives it.

The awaits are listed from the code, and one that no scenario reaches fails a test. Each is cut in the first
scenario that reaches it, in a whole job under virtual time. Afterwards no worker claims a version that it
does not hold, what survives and what its users restart takes the next version, and nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import logging
import random
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

import wbridge
from tests.faults.scenarios import SCENARIOS
from tests.faults.world import Injected, Leaks, World
from wbridge.errors import PeerLost
from wbridge.testing.awaits import Chain, Code, Cut, Point, Watch
from wbridge.testing.clock import owner, run_virtual

ROOT = Path(wbridge.__file__).parent
PACKAGES = ("session", "engine", "control", "staging", "flow")
MORE = tuple(f"transport/{name}.py" for name in ("loopback", "select", "inbox", "operations", "exposures"))
"""Transports that leave the process have their own faults: the conformance suite, and the process tests."""

FILES = [f"{package}/{path.name}" for package in PACKAGES for path in sorted((ROOT / package).glob("*.py"))]
CODE = Code("wbridge", [*FILES, *MORE])

How = Literal["cancel", "close", "fail", "break"]
"""Cancel the task (a user's by asyncio, one of ours as its task group would); close its adapter at that very
moment; let the statement fail before it waits; break the socket that it waits for."""

SAMPLE = 12
"""Cuts of each kind in an ordinary session; `nox -s explore` makes them all."""

UNREACHED = {
    # The thread that virtual time replaces; `test_lifecycle` covers it.
    ("session/portal.py", "async with anyio.create_task_group() as self._tasks:"): "needs a thread",
    ("session/portal.py", "await self._stop.wait()"): "needs a thread",
    ("session/worker.py", "device.close"): "a device of the adapter's own, whose streams are threads",
    # No adapter asks for TLS yet; `test_connection` covers it.
    ("control/connection.py", "take(await self.receive())"): "TLS",
    ("control/tcp.py", "_start_tls("): "TLS",
    ("control/tcp.py", "return await TLSStream.wrap("): "TLS",
    ("control/tcp.py", "await anyio.aclose_forcefully(stream)"): "a listener with another secret",
    # Other transports than loopback.
    ("transport/select.py", "self._shared_memory"): "another process",
    ("transport/select.py", "self._ucxx"): "another process",
    ("engine/credits.py", "Placed("): "parameters in shared memory",
    ("engine/receive.py", "await after.wait()"): "parameters in shared memory",
    ("session/late_writers.py", "await transports.withdraw("): "parameters in shared memory",
    ("engine/mailer.py", "self._endpoint.fill("): "a transport that fills in place",
    ("engine/mailer.py", "self._put_lent("): "a transport that puts runs",
    ("engine/mailer.py", "await ready.wait()"): "a transport that puts runs",
    ("engine/mailer.py", "put_runs("): "a transport that puts runs",
    ("engine/mailer.py", "await self._settle()  # reads the weights"): "a transport that puts runs",
    ("engine/receive.py", "await self._apply_in_place(ticket)"): "a transport that fills in place",
    ("engine/receive.py", "await self._wait_ready(ticket, group.index))"): "a transport that fills in place",
    ("engine/lockstep.py", "await self._changed.wait()"): "a hold that ends while steps are open",
    ("session/readiness.py", "await self._wait_readers(after)"): "a device that works beside the caller",
    ("session/rollout.py", "await self._engine.wait_readers(after)"): "a device that works beside the caller",
    ("engine/mailer.py", "_adopt"): "a transport that fills in place",
    ("engine/mailer.py", "to_thread.run_sync(adopt"): "a transport that fills in place",
    ("engine/mailer.py", "await gathered.wait()"): "its cleanup, and gathering in place",
    ("engine/mailer.py", "self._arrived(order, window"): "gathering in place",
    # Loopback copies small pieces at once, so nobody is ever found in the middle of a write.
    ("transport/exposures.py", "await wakeup.wait()"): "a write in progress",
    ("transport/loopback.py", "self._exposures.withdraw(remote)"): "a writer that is still there",
    ("engine/receive.py", "await anyio.sleep_forever()"): "a write in progress",
    ("transport/loopback.py", "await endpoint.aclose()"): "an endpoint that its epoch has not closed",
    ("transport/inbox.py", "await turn.wakeup.wait()"): "256 unread messages",
    # What cleans up after another await was cut: these run in the cuts themselves.
    ("engine/link.py", "await connection.aclose()"): "cleanup",
    ("engine/receive.py", "await scatters.run()"): "cleanup",
    ("session/contexts.py", "await _close(endpoints)"): "cleanup",
    ("session/contexts.py", "await endpoint.aclose()"): "cleanup",
    ("session/sending.py", "await self.withdraw(publication)"): "cleanup",
    ("session/sending.py", "await publication.answered.wait()"): "cleanup",
    ("session/sending.py", "await publication.released.wait()"): "cleanup",
    (
        "control/tcp.py",
        "await anyio.sleep(ACCEPT_AGAIN_S)",
    ): "no free descriptor",
    # A worker that breaks the protocol, a coordinator that is found again after it was left.
    ("control/coordinator.py", "await lease.wait_lost()"): "a worker that breaks the protocol",
    ("control/lease.py", "await self.receive()"): "a worker that breaks the protocol",
    ("control/local.py", "await self.receive()"): "a worker that breaks the protocol",
    ("control/lease.py", "await self._connection.send_frame("): "a full socket; `test_lease` covers it",
    ("control/lease.py", "await anyio.sleep(LAST_LOOK_S)"): "a peer that is silent; `test_lease` covers it",
    # One that is closed has said what becomes of its grants.
    ("engine/lockstep.py", "sleep(self._config.coordinator_timeout_s)"): "a coordinator that dies",
    ("session/member.py", "await connection.aclose()"): "an incarnation that comes back",
    ("session/member.py", "await anyio.sleep(MAX_BACKOFF_S)"): "an incarnation that comes back",
    # A coordinator on its own (`wbridge coordinator`) says goodbye; an embedded one ends with its worker.
    (
        "control/coordinator.py",
        "await self._epochs.wait_until(lambda: not any(self._membership))",
    ): "standalone",
    ("control/publishing.py", "await self._wait_changed()"): "an epoch that ends while a grant is out",
    ("control/epochs.py", "await live.wait_settled()"): "an epoch that ends while a grant is out",
}
"""Awaits that no scenario reaches, by file and a part of their line, with the reason."""

IDLE = ("create_task_group()", "async with lease", "LeasedConnection(")
"""What entering these blocks runs is nothing that could fail."""

WHOLE = ("session/portal.py", "session/worker.py")
"""Where `await work()` fails only as what it runs: no coroutine function fails before its first line."""

WIRE = ("control/connection.py", "control/tcp.py")
"""Where a broken connection is noticed."""

ALONE = ("session/sender.py", "session/trainer.py", "session/script.py")
"""A send that fails here never begins, so the other ranks wait for this one to try again."""


FOUND: tuple[tuple[How, str, str], ...] = (
    ("cancel", "engine/scatters.py", "await wait()"),  # a half-written version counted as applied
    ("cancel", "session/sender.py", "send_weights("),  # the other ranks waited for a call that never began
    ("fail", "engine/puts.py", "close_endpoints"),  # streams stayed open
    ("fail", "engine/receive.py", "close_endpoints"),
    ("fail", "session/contexts.py", "await _connect("),
    ("fail", "session/member.py", "self._detached.wait()"),  # closing stopped, and could not be tried again
    (
        "fail",
        "session/sending.py",
        "staging.snapshot(",
    ),  # an ExceptionGroup for the caller, a wait for the rest
    ("close", "session/sender.py", "await drive_async(self._trainer.close())"),
    ("cancel", "engine/link.py", "await connection.send("),  # the connection stayed open
    ("fail", "engine/link.py", "await connection.send("),
    ("fail", "control/epochs.py", "await self._form()"),  # the listener lost a peer that it had accepted
)
"""Cuts that once went wrong; always made."""


class Reached(msgspec.Struct):
    """Where a point is reached first: the scenario and the chain of the task that is suspended there."""

    scenario: str
    chain: Chain


pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Hundreds of jobs that break on purpose."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@functools.cache
def record(scenario: str) -> tuple[list[Chain], frozenset[Point]]:
    """Run a scenario uncut; return where its tasks were suspended, in order, and what was executed."""
    watch = Watch(CODE)
    play(scenario, watch)
    return watch.chains, frozenset(watch.executed)


def play(
    scenario: str,
    watch: Watch,
    raising: BaseException | None = None,
    *,
    is_cut: bool = False,
    leaves_open: bool = False,
) -> None:
    """Run one job through a scenario, let its users recover, and look for what is left.

    `leaves_open`: a close fails instead of closing, so the collector finds what was to be closed.
    """
    act, settings = SCENARIOS[scenario]

    async def main(path: Path) -> None:
        leaks = Leaks()
        with watch.tasks():
            world = worlds[watch] = World(path, **settings)  # type: ignore[arg-type]  # by name
            world.resends = is_cut and watch.cuts_in(ALONE)
            with watch.trace(raising=raising) if raising or not is_cut else contextlib.nullcontext():
                await act(world)
            watch.stop()
            assert watch.is_cut == is_cut, "the cut was not reached: the run went another way"
            await world.recover()
            await world.finish()
        device = world.device
        del world, worlds[watch]
        if raising is not None:  # it knows every frame that it went through
            raising.__traceback__ = raising.__context__ = raising.__cause__ = None
        leaks.check(device)

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as unclosed:
        warnings.simplefilter("always", ResourceWarning)
        run_virtual(lambda: main(Path(folder)))
        gc.collect()
    found = [str(warning.message) for warning in unclosed]
    assert leaves_open or not found, f"left to the collector: {found}"


worlds: dict[Watch, World] = {}
"""The running one, for whoever cuts it."""


@functools.cache
def first_reached() -> dict[Point, Reached]:
    """Each point that suspends a task, with the first scenario in which it does."""
    found: dict[Point, Reached] = {}
    for scenario in SCENARIOS:
        for chain in record(scenario)[0]:
            for point in chain:
                found.setdefault(point, Reached(scenario, chain))
    return found


@functools.cache
def first_executed() -> dict[Point, str]:
    found: dict[Point, str] = {}
    for scenario in SCENARIOS:
        for point in record(scenario)[1]:
            found.setdefault(point, scenario)
    return found


def cuts(how: How) -> list[Point]:
    """The points that are cut in this way. Those of one suspension are cut together, by its innermost."""
    if how == "fail":
        return sorted(p for p in first_executed() if not is_part(p))
    reached = first_reached()
    if how == "break":
        waits = [p for p in reached if p.file in WIRE and p.kind != "leave"]
        return sorted(p for p in waits if reached[p].chain[-1] == p)
    chains = {reached[point].chain: point for point in sorted(reached)}
    return sorted(chains.values())


def later(point: Point) -> int:
    """Some suspension at this point after the first one, if there are more; else 1."""
    count = sum(point in chain for chain in record(first_reached()[point].scenario)[0])
    return random.Random(str(point)).randint(2, count) if count > 1 else 1


def cut(point: Point, how: How, nth: int = 1) -> None:
    """Cut one await in one run; everything else is `play`'s to check."""
    if how == "fail":
        is_control = point.file.startswith(("control/", "transport/"))
        kind = PeerLost if is_control else Injected
        play(
            first_executed()[point],
            Watch(CODE, Cut(point)),
            kind(f"injected at {point}"),
            is_cut=True,
            leaves_open="aclose()" in line_of(point),
        )
        return

    def inject(chain: Chain) -> BaseException | None:
        if how == "break":
            return OSError("injected: the connection was reset")
        task, adapter = asyncio.current_task(), owner.get()
        assert task is not None
        if how == "close" and adapter:
            worlds[watch].close_owner(adapter)
        else:
            task.cancel()
        return None

    watch = Watch(CODE, Cut(point, nth), inject)
    play(first_reached()[point].scenario, watch, is_cut=True)


def is_part(point: Point) -> bool:
    """It fails only with something that fails by itself: what runs in a block, or what `work` runs."""
    line = line_of(point)
    is_idle = point.kind == "enter" and any(text in line for text in IDLE)
    return point.kind == "leave" or is_idle or (point.file in WHOLE and "await work()" in line)


def line_of(point: Point) -> str:
    return (ROOT / point.file).read_text().splitlines()[point.line - 1].strip()


def check(points: list[Point], how: How, *, first: bool = True) -> None:
    failed: dict[str, str] = {}
    for point in points:
        try:
            cut(point, how, 1 if first else later(point))
        except Exception as exc:  # collected, so that one run shows all
            error: BaseException = exc
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            failed[str(point)] = f"{type(error).__name__}: {error}"
    assert not failed, "\n".join(f"{how} {point}: {why}" for point, why in failed.items())


def test_every_await_is_reached() -> None:
    missing = [point for point in CODE.points() if point not in first_executed()]
    known = {key: [p for p in missing if p.file == key[0] and key[1] in line_of(p)] for key in UNREACHED}
    excused = set(itertools.chain.from_iterable(known.values()))
    assert not [f"{point}: {line_of(point)}" for point in missing if point not in excused]
    assert not [key for key, points in known.items() if not points], "reached now: remove the excuse"


@pytest.mark.parametrize("how", ["cancel", "close", "fail", "break"])
def test_an_await_that_is_cut_leaves_a_job_that_goes_on(how: How) -> None:
    points = cuts(how)
    check(random.Random(0).sample(points, min(SAMPLE, len(points))), how)


def test_cuts_that_once_went_wrong() -> None:
    for how in ("cancel", "close", "fail"):
        wanted = [(file, text) for kind, file, text in FOUND if kind == how]
        points = [[p for p in cuts(how) if p.file == file and text in line_of(p)] for file, text in wanted]
        assert all(points), f"{how}: not reached any more: {wanted}"
        check(sorted({point for found in points for point in found}), how)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["cancel", "close", "fail", "break"])
def test_every_await_that_is_cut_leaves_a_job_that_goes_on(how: How) -> None:
    check(cuts(how), how)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["cancel", "close"])
def test_every_await_that_is_cut_later_on_leaves_a_job_that_goes_on(how: How) -> None:
    # Nothing but the end of its adapter cancels the task that listens to a worker of the engine, and that
    # end is `close`. Cancelled alone, it would leave the leader to wait for a worker that it still has.
    listens = "engine/link.py" if how == "cancel" else ""
    check([p for p in cuts(how) if later(p) > 1 and p.file != listens], how, first=False)
