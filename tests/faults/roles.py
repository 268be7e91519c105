"""One worker of a job in a process of its own, told what to do through a pipe; and the pipe's other end.

The processes come from a fork server that has imported everything, so that a job of six starts quickly.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

import wbridge.sync
from tests.models.toy import Rollout, Trainer
from wbridge.cli.main import main
from wbridge.errors import EndpointClosed, PeerLost, UpdateAborted, WBridgeError
from wbridge.testing.transitions import Seat, Transition, acting_at

Message = dict[str, Any]  # Any: JSON

PATIENCE_S = 30.0
"""No case waits this long unless it fails."""

SHORT = {"coordinator_timeout_s": 1.0, "fence_timeout_s": 1.0, "hold_timeout_s": 5.0, "close_timeout_s": 10.0}

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "torch.distributed.fsdp", "torch.distributed.tensor.parallel"])


# In the process of the worker -----------------------------------------------------------------------------


class Pipe:
    """Tells the test what happens here; any thread may."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def tell(self, what: str, **more: object) -> None:
        with self._lock:
            self._connection.send_bytes(json.dumps({"what": what, **more}).encode())

    def fail(self, what: str, error: Exception) -> None:
        self.tell(what, error=type(error).__name__, text=str(error), is_ours=isinstance(error, WBridgeError))

    def commands(self) -> Iterator[Message]:
        while True:
            yield json.loads(self._connection.recv_bytes())


class Held:
    """What this process holds of the system."""

    def __init__(self) -> None:
        self.descriptors = sorted(_descriptors())
        self.threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("wbridge"))
        self.mapped = sum("memfd:wbridge" in line for line in _lines("/proc/self/maps"))

    def since(self, before: Held) -> Message:
        """What has come and not gone."""
        left = list(self.descriptors)
        for name in before.descriptors:
            with contextlib.suppress(ValueError):
                left.remove(name)
        return {"descriptors": left, "threads": self.threads, "mapped": self.mapped - before.mapped}


def _descriptors() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            yield os.readlink(f"/proc/self/fd/{fd}").split(":")[0]


def collect() -> None:
    """Free what only cycles hold: memory that its own mapping refers to takes more than one pass."""
    for _ in range(3):
        gc.collect()


def _lines(path: str) -> list[str]:
    with open(path) as file:
        return file.readlines()


def measure(held_for_peers: Sized) -> Message:
    """What grows if an update leaves something behind."""
    collect()
    resident = int(_lines("/proc/self/statm")[0].split()[1]) * os.sysconf("SC_PAGE_SIZE")
    held = Held()
    return {
        "resident": resident,
        "descriptors": len(held.descriptors),
        "threads": threading.active_count(),
        "mapped": held.mapped,
        "held_for_peers": len(held_for_peers),
    }


def busy_slots(receiver: wbridge.sync.ReceiverAdapter) -> list[str]:
    """The states of the slots that do not become free although no update is under way."""
    engine, until_s = receiver._rollout._engine, time.monotonic() + PATIENCE_S / 3
    while engine is not None and (busy := [state for state in engine._ring.states if state != "free"]):
        if time.monotonic() > until_s:
            return busy
        time.sleep(0.005)  # whoever has written them says so when he comes to it
    return []


class Watching:
    """Kills, stops, or just tells of a process at a transition that this one passes."""

    def __init__(self, pipe: Pipe, seat: Seat) -> None:
        self._pipe, self._seat = pipe, seat
        self._armed = contextlib.ExitStack()

    def arm(self, transition: Transition, seat: Seat | None, pid: int, number: int) -> None:
        def act() -> None:
            self._pipe.tell("passed", transition=transition)
            os.kill(pid, number)

        self._armed.enter_context(acting_at(transition, seat or self._seat, act))
        self._pipe.tell("armed")


def choose_ucx(way: str) -> None:
    """Before anything has loaded UCX: `native`, `tcp` for that over TCP alone, or `python` without it."""
    if way == "tcp":
        os.environ["UCX_TLS"] = "tcp"
    if way == "python":
        sys.modules["wbridge.native._ucx"] = cast(Any, None)  # Any: such a module is taken for missing


def work_as_trainer(
    connection: Connection, url: str, config: Mapping[str, object], rank: int, ucx: str = "native"
) -> None:
    """Send what is asked for, until told to leave."""
    torch.set_num_threads(1)
    choose_ucx(ucx)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
    pipe, trainer = Pipe(connection), Trainer(rank, 2)
    watching = Watching(pipe, "trainer")

    def adapter() -> wbridge.sync.SenderAdapter:
        return wbridge.sync.SenderAdapter(trainer.source, rendezvous=url, config=config)

    before, sender = Held(), adapter()
    for command in pipe.commands():
        try:
            match command["do"]:
                case "connect":
                    sender.close()
                    sender = adapter()
                    sender.connect()
                    pipe.tell("connected")
                case "arm":
                    watching.arm(command["transition"], command["seat"], command["pid"], command["signal"])
                case "send":
                    trainer.set_version(command["version"])
                    for left in reversed(range(command["attempts"])):
                        try:
                            delivery = sender.send_weights(command["version"])
                            break
                        except (UpdateAborted, PeerLost, EndpointClosed) as exc:  # as a trainer would
                            if not left:
                                raise
                            if isinstance(exc, EndpointClosed):
                                sender.close()
                                sender = adapter()
                                sender.connect()
                    pipe.tell("sent", version=command["version"])
                case "outcomes":
                    pipe.tell("outcomes", outcomes=delivery.applied(command.get("timeout_s")))
                case "counters":
                    pipe.tell("counters", **sender.counters)
                case "measure":
                    pipe.tell("measured", **measure(sender._trainer._epoch.engine._puts._credits))
                case "close":
                    sender.close()
                    del sender
                    collect()
                    pipe.tell("closed", left=Held().since(before))
                    return
        except KeyboardInterrupt:
            pipe.tell("interrupted")
        except Exception as exc:  # the test decides
            pipe.fail("failed", exc)


def work_as_rollout(
    connection: Connection,
    url: str,
    config: Mapping[str, object],
    engine: str,
    rank: int,
    size: int,
    ucx: str = "native",
) -> None:
    """Poll in a thread from `connect` on, and tell of each update, until told to leave."""
    torch.set_num_threads(1)
    choose_ucx(ucx)
    pipe, rollout = Pipe(connection), Rollout(engine, rank, size)
    watching = Watching(pipe, "follower" if rank else "leader")
    before = Held()
    receiver: wbridge.sync.ReceiverAdapter | None = None
    rolling = threading.Thread()

    def roll(receiver: wbridge.sync.ReceiverAdapter) -> None:
        while True:
            try:
                if update := receiver.poll_requests(wait_s=PATIENCE_S):
                    pipe.tell("applied", version=update.version, whole=rollout.holds(update.version))
            except UpdateAborted as exc:  # tainted: the next whole version heals it
                pipe.fail("aborted", exc)
            except Exception as exc:  # the test decides
                pipe.fail("failed", exc)
                return pipe.tell("state", **_state(receiver, rollout))

    def leave() -> None:
        if receiver is not None:
            receiver.close()
            rolling.join()

    for command in pipe.commands():
        match command["do"]:
            case "connect":
                leave()
                receiver = wbridge.sync.ReceiverAdapter(rollout.target, rendezvous=url, config=config)
                try:
                    receiver.connect()
                except WBridgeError as exc:
                    pipe.fail("failed", exc)
                    continue
                rolling = threading.Thread(target=roll, args=(receiver,))
                rolling.start()
                pipe.tell("connected")
            case "arm":
                watching.arm(command["transition"], command["seat"], command["pid"], command["signal"])
            case "counters":
                pipe.tell("counters", **receiver.counters)
            case "measure":
                pipe.tell("measured", **measure(receiver._rollout._engine._exposed.keys))
            case "state":
                pipe.tell("state", **_state(receiver, rollout))
            case "close":
                busy = [] if receiver is None else busy_slots(receiver)
                leave()
                receiver = None
                rolling = threading.Thread()
                collect()
                return pipe.tell("closed", left={**Held().since(before), "slots": busy})


def _state(receiver: wbridge.sync.ReceiverAdapter, rollout: Rollout) -> Message:
    """Whether an engine that has failed is tainted or has one whole version."""
    try:
        with receiver.step() as version:
            whole = version is None or rollout.holds(version)
            return {"tainted": False, "version": version, "whole": whole}
    except WBridgeError as exc:
        return {"tainted": True, "text": str(exc)}


def work_as_coordinator(connection: Connection, url: str, config: Mapping[str, object]) -> None:
    pipe = Pipe(connection)
    watching = Watching(pipe, "coordinator")

    def obey() -> None:
        for command in pipe.commands():
            match command["do"]:
                case "arm":
                    watching.arm(command["transition"], command["seat"], command["pid"], command["signal"])
                case "close":
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

    os.environ.update({f"WBRIDGE_{name.upper()}": str(value) for name, value in config.items()})
    threading.Thread(target=obey, daemon=True).start()
    with contextlib.redirect_stdout(None):
        main(["coordinator", url])
    pipe.tell("closed", left={"descriptors": [], "threads": [], "mapped": 0})


# In the process of the test -------------------------------------------------------------------------------


class Actor:
    """A worker's process as the test sees it."""

    def __init__(self, name: str, work: Callable[..., None], *arguments: object) -> None:
        self.name, self._work, self._arguments = name, work, arguments
        self.heard: list[Message] = []
        self.start()

    def __repr__(self) -> str:
        return f"<{self.name}, heard {self.heard}>"

    def start(self) -> None:
        """Start the process, or a new one in the place of one that has ended."""
        self.heard.clear()
        self._pipe, theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=self._work, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, do: str, **more: object) -> None:
        self._pipe.send_bytes(json.dumps({"do": do, **more}).encode())

    def hear(self, *whats: str, within_s: float = PATIENCE_S, **having: object) -> Message:
        """The first message of one of these kinds with these values, taken off what was heard."""
        deadline_s = time.monotonic() + within_s
        while True:
            for message in self.heard:
                if message["what"] in whats and having.items() <= message.items():
                    self.heard.remove(message)
                    return message
            left_s = deadline_s - time.monotonic()
            assert left_s > 0 and self._pipe.poll(left_s), f"{self}: no {whats} {having} in {within_s} s"
            self.heard.append(json.loads(self._pipe.recv_bytes()))

    def drain(self) -> None:
        with contextlib.suppress(EOFError):
            while self._pipe.poll():
                self.heard.append(json.loads(self._pipe.recv_bytes()))

    def died_of(self, number: int) -> bool:
        self._process.join(PATIENCE_S)
        return self._process.exitcode == -number

    def ended(self) -> int | None:
        self._process.join(PATIENCE_S)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()
