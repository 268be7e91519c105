"""Count the system calls of one thread, from outside: a process of its own traces it (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import struct
import threading
from collections.abc import Callable
from typing import Any

SEIZE, INTERRUPT, SYSCALL, DETACH, SYSCALL_INFO = 0x4206, 0x4207, 24, 17, 0x420E
TRACE_SYSGOOD = 1
SYSCALL_STOP = signal.SIGTRAP | 0x80
INFO_NBYTES, ENTRY = 88, 1
FIRST_ARGUMENT = 32
"""Where `ptrace_syscall_info` has the first argument of a call that is entered."""
WAIT_ALL = 0x40000000
"""`__WALL`: threads of other processes too."""
MARK = 0x7ABCDEF1
"""No process has this id, so that a call with it marks a place and does nothing."""


def count_system_calls(work: Callable[[], object]) -> int:
    """Run `work` in this thread and return how many system calls this thread made in it.

    Raises:
        RuntimeError: this system lets no process trace its parent.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    _allow_tracing()
    tracer = context.Process(target=_trace, args=(threading.get_native_id(), theirs))
    tracer.start()
    theirs.close()
    ours.recv()  # the tracer is attached, or cannot be
    _mark()
    work()
    _mark()
    counted = ours.recv()
    tracer.join()
    if isinstance(counted, str):
        raise RuntimeError(counted)
    return int(counted)


def _allow_tracing() -> None:
    """Where only descendants may be traced, make an exception for the process that counts."""
    set_ptracer, any_process = 0x59616D61, ctypes.c_ulong(-1)
    ctypes.CDLL(None).prctl(set_ptracer, any_process, 0, 0, 0)


def _mark() -> None:
    with contextlib.suppress(ProcessLookupError):
        os.getpgid(MARK)


def _trace(thread: int, connection: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes, libc.ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long

    def ptrace(request: int, address: int = 0, data: int = 0) -> None:
        if libc.ptrace(request, thread, address, data) == -1:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "ptrace")

    try:
        ptrace(SEIZE, 0, TRACE_SYSGOOD)
        ptrace(INTERRUPT)
        os.waitpid(thread, WAIT_ALL)
        ptrace(SYSCALL)
    except OSError as exc:
        connection.send("not attached")
        connection.send(f"system calls cannot be counted here: {exc}")
        return
    connection.send("attached")
    info = ctypes.create_string_buffer(INFO_NBYTES)
    num_calls, num_marks = 0, 0
    while True:
        _, status = os.waitpid(thread, WAIT_ALL)
        stop = os.WSTOPSIG(status)
        if stop == SYSCALL_STOP:
            ptrace(SYSCALL_INFO, INFO_NBYTES, ctypes.addressof(info))
            (argument,) = struct.unpack_from("Q", info.raw, FIRST_ARGUMENT)
            is_entry = info.raw[0] == ENTRY
            is_mark = is_entry and argument == MARK
            num_marks += is_mark
            if num_marks == 2:
                break
            num_calls += is_entry and num_marks == 1 and not is_mark
        is_signal = stop not in (SYSCALL_STOP, signal.SIGTRAP) and not status >> 16
        ptrace(SYSCALL, 0, stop if is_signal else 0)
    ptrace(DETACH)
    connection.send(num_calls)
