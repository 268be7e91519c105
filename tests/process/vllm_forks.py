"""A process that has imported vLLM, which takes long, and forks for each call; and its other end."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "tests.process.vllm_follow",  # first: it chooses vLLM's settings
    "tests.models.vllm_rank",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "wbridge.integrations.vllm.server",
)


class VllmForks:
    """Starts the process when it is first needed, and again after a call that did not end in time."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(self, function: str, *calls: Sequence[str], output: Path) -> list[int]:
        """Call `module:function` once with each list of arguments, all at once; return the exit codes.

        What they print is appended to `output`.
        """
        if self._server is None:
            command = [sys.executable, "-m", "tests.process.vllm_forks"]
            self._server = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._server.stdin is not None and self._server.stdout is not None
        try:
            self._server.stdin.write(json.dumps([function, calls, str(output)]) + "\n")
            self._server.stdin.flush()
            codes: list[int] = json.loads(self._server.stdout.readline())
            return codes
        except BaseException:  # the test's time is over, or the process has ended
            self.close()
            raise

    def close(self) -> None:
        """End the process and whatever its forks have started."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            with self._server:
                self._server = None


def serve() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        function, calls, output = json.loads(line)
        forks = [fork(function, arguments, output) for arguments in calls]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forks]
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()


def fork(function: str, arguments: list[str], output: str) -> int:
    """Call in a new process, which ends as every program does."""
    if pid := os.fork():
        return pid
    printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (printed, 1), (printed, 2)):
        os.dup2(descriptor, target)
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*arguments)
    sys.exit()


if __name__ == "__main__":
    serve()
