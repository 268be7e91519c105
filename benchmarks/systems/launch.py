"""Processes: one plain process per worker, driven over pipes. Ray and Monarch bring their own launchers."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from benchmarks.links.hosts import Host
from benchmarks.systems.worker import LIBC, LOOPBACK, Worker
from benchmarks.systems.workloads import Job, Workload

STOP_TIMEOUT_S = 5.0
END_WITH_PARENT = 1
"""`PR_SET_PDEATHSIG`."""
Call = tuple[str, tuple[Any, ...]]


class WorkerFailed(Exception):
    """A worker raised; the message is its traceback."""


class Launcher(Protocol):
    """Workers of a case by index: trainers first."""

    def call(self, indices: Sequence[int], method: str, *arguments: Any) -> Callable[[], list[Any]]:
        """Begin a method of some workers; what is returned waits for their results."""
        ...

    def stop(self) -> None: ...


class Processes:
    """Processes of this interpreter: of one host from a server that has imported torch, else spawned."""

    def __init__(
        self, system: str, workload: Workload, options: dict[str, str], hosts: Sequence[Host] = ()
    ) -> None:
        """`hosts` has the one of each worker; empty: all live on this one."""
        context = multiprocessing.get_context("spawn" if hosts else "forkserver")
        context.set_forkserver_preload([Worker.__module__])
        self._calls: list[Connection] = []
        self._exchanges: list[Connection] = []
        self._processes = []
        for index, (role, rank) in enumerate(roles(workload.job)):
            ours, theirs = context.Pipe()
            our_exchange, their_exchange = context.Pipe()
            host = hosts[index] if hosts else None
            arguments = (host, theirs, their_exchange, system, workload, options, role, rank)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            their_exchange.close()
            self._calls.append(ours)
            self._exchanges.append(our_exchange)
            self._processes.append(process)
        threading.Thread(target=self._pass_on, daemon=True).start()
        self._collect(range(len(self._calls)))  # all have their parameters

    def call(self, indices: Sequence[int], method: str, *arguments: Any) -> Callable[[], list[Any]]:
        for index in indices:
            self._calls[index].send((method, arguments))
        return lambda: self._collect(indices)

    def stop(self) -> None:
        for connection in self._calls:
            connection.close()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.is_alive():
                process.kill()

    def _collect(self, indices: Iterable[int]) -> list[Any]:
        answers = [self._calls[index].recv() for index in indices]
        for is_good, answer in answers:
            if not is_good:
                raise WorkerFailed(answer)
        return [answer for _, answer in answers]

    def _pass_on(self) -> None:
        """Serve `Context.exchange`: one value from each worker, all of them to each."""
        try:
            while True:
                values = [connection.recv() for connection in self._exchanges]
                for connection in self._exchanges:
                    connection.send(values)
        except (EOFError, OSError):
            return  # a worker has ended


def roles(job: Job) -> list[tuple[str, int]]:
    trainers = [("trainer", rank) for rank in range(job.num_trainers)]
    return trainers + [("rollout", rank) for rank in range(job.num_rollouts)]


def _serve(host: Host | None, calls: Connection, exchanges: Connection, *arguments: Any) -> None:
    LIBC.prctl(END_WITH_PARENT, signal.SIGKILL)
    if host:
        host.enter()

    def exchange(value: Any) -> list[Any]:
        exchanges.send(value)
        found: list[Any] = exchanges.recv()
        return found

    def answer(work: Callable[[], Any]) -> Any:
        try:
            result = work()
        except Exception:  # reported to the driver, which ends the run
            calls.send((False, traceback.format_exc()))
            return None
        calls.send((True, result if not isinstance(result, Worker) else None))
        return result

    address = host.address if host else LOOPBACK
    worker = answer(lambda: Worker(*arguments, exchange=exchange, address=address))
    while worker is not None:
        try:
            method, values = calls.recv()
        except EOFError:
            return
        answer(lambda method=method, values=values: getattr(worker, method)(*values))
