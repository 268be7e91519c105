"""Short programs in processes of their own, forked from one that has imported torch and wbridge."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TextIO

from tests.faults.roles import FORKS

PRELUDE = """
import sys, torch, wbridge, wbridge.sync
torch.set_num_threads(1)
from tests.models.toy import Rollout, Trainer
from tests.unit.session.job import settings
url, mode = sys.argv[1:3]
def config(mode, num_engines, transport="auto"):
    return settings(mode, num_engines, transport=transport, relay_patience_s=0.05)
def say(*words):
    print(*words, flush=True)
"""


class Script:
    """A running program; its standard input and output are pipes to here."""

    def __init__(self, code: str, arguments: tuple[str, ...]) -> None:
        theirs, ours = FORKS.Pipe(duplex=True)
        self._process = FORKS.Process(target=_run, args=(theirs, code, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.stdin: TextIO = os.fdopen(os.dup(ours.fileno()), "w")
        self.stdout: TextIO = os.fdopen(os.dup(ours.fileno()))
        ours.close()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, negative for a signal; None if the program still runs."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.stdin.close()
        self.stdout.close()


def _run(connection: Connection, code: str, arguments: tuple[str, ...]) -> None:
    for descriptor in (0, 1):
        os.dup2(connection.fileno(), descriptor)
    connection.close()
    sys.stdin, sys.stdout, sys.argv = os.fdopen(0), os.fdopen(1, "w"), ["-c", *arguments]
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})


@contextmanager
def process(script: str, *arguments: str, first: str = "") -> Iterator[Script]:
    """Run `script`; `first` comes before its imports."""
    child = Script(first + PRELUDE + script, arguments)
    try:
        yield child
    finally:
        child.close()


def heard(child: Script | subprocess.Popen[str]) -> str:
    """The next line that a process says; empty when it has ended. UCX logs to the same place."""
    assert child.stdout is not None
    while (line := child.stdout.readline()).startswith("["):
        sys.stderr.write(line)
    return line.strip()


def tell(child: Script | subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(f"{line}\n")
    child.stdin.flush()
