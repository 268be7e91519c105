"""Short programs in processes of their own, forked from one that has imported torch and wbridge."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
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


def run(program: Path, *, first: str, timeout_s: float) -> tuple[int | None, str]:
    """Run a program to its end, in its folder; return its exit code, if it ends, and all it says."""
    printed = program.with_suffix(".printed")
    child = FORKS.Process(target=_run_file, args=(program, printed, first), daemon=True)
    child.start()
    child.join(timeout_s)
    code = child.exitcode
    child.kill()
    child.join()
    child.close()
    return code, printed.read_text()


def _run_file(program: Path, printed: Path, first: str) -> None:
    os.chdir(program.parent)
    with open(printed, "w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    exec(first)
    exec(compile(program.read_text(), str(program), "exec"), {"__name__": "__main__"})


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
