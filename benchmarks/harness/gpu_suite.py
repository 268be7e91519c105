"""Run what needs a GPU on a machine that has one and no network, part by part, each with a time limit.

    python3 benchmarks/harness/gpu_suite.py [--out DIR] [--wheels DIR] [--parts build,tests]

`wheels` installs every wheel of a folder, without a network, into a folder of its own. `build` compiles the
native extension beside the sources. `tests` and `bench` run with both on their path. A part that fails
does not stop the next one; tests of which none has run have failed. Logs, `gpu.json` and `summary.json` are
in `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu"
RESULTS = ROOT / "build" / "gpu-results"
GRACE_S = 10.0
FILE_LIMIT_S = 200.0
NO_TESTS = 5
"""pytest's exit code when nothing was chosen."""
NEEDED = ("torch", "anyio", "msgspec", "xxhash", "pytest", "pytest_timeout", "hypothesis", "cuda.core")
DISTRIBUTIONS = (
    "anyio",
    "msgspec",
    "xxhash",
    "pytest",
    "pytest-timeout",
    "hypothesis",
    "cuda-core",
    "cuda-bindings",
)


class Options(NamedTuple):
    """What the command line asks for."""

    out: Path
    wheels: Path | None
    site: Path
    tests: list[str]
    bench: list[str]
    tests_limit_s: float
    bench_limit_s: float

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(ROOT / "src"), str(ROOT), str(self.site), os.environ.get("PYTHONPATH", "")]
        more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
        return {**os.environ, **more, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def main() -> int:
    arguments = parse_arguments()
    options = options_of(arguments)
    chosen = arguments.parts.split(",")
    if unknown := sorted(set(chosen) - set(PARTS)):
        print(f"there is no part {unknown[0]!r}; choose of {', '.join(PARTS)}")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, object] = {"python": platform.python_version(), "machine": platform.machine()}
    is_well = True
    for name in chosen:
        begin_s = time.monotonic()
        print(f"== {name}", flush=True)
        passed = PARTS[name](options)
        took_s = time.monotonic() - begin_s
        summary[name] = {"passed": passed, "seconds": round(took_s, 1)}
        print(f"== {name}: {'passed' if passed else 'FAILED'} in {took_s:.1f} s", flush=True)
        is_well = is_well and passed
        (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if is_well else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder for logs and results: {RESULTS}")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of what is not installed here")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of these, in order")
    parser.add_argument("--tests", default="", help="arguments for pytest, such as '-k streams'")
    parser.add_argument("--bench", default="", help="arguments for the benchmark, such as '--only pinned'")
    parser.add_argument("--tests-limit-s", type=float, default=480.0)
    parser.add_argument("--bench-limit-s", type=float, default=240.0)
    return parser.parse_args()


def options_of(arguments: argparse.Namespace) -> Options:
    return Options(
        out=arguments.out.resolve(),
        wheels=arguments.wheels.resolve() if arguments.wheels else None,
        site=Path(tempfile.gettempdir()) / f"wbridge-gpu-site-{os.getuid()}",
        tests=shlex.split(arguments.tests),
        bench=shlex.split(arguments.bench),
        tests_limit_s=arguments.tests_limit_s,
        bench_limit_s=arguments.bench_limit_s,
    )


def install_wheels(options: Options) -> bool:
    if options.wheels is None:
        print("no --wheels: only what is installed is used")
        return True
    wheels = sorted(str(path) for path in options.wheels.glob("*.whl"))
    if not wheels:
        print(f"there is no wheel in {options.wheels}")
        return False
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    return run([*pip, "--upgrade", "--target", str(options.site), *wheels], "wheels", options, limit_s=120.0)


def build_extension(options: Options) -> bool:
    cmake = ["cmake", "-S", str(ROOT / "native"), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release"]
    configure = [*cmake, "-DWBRIDGE_INPLACE=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    return run(configure, "build", options, limit_s=60.0) and run(
        ["cmake", "--build", str(BUILD), "--parallel"], "build", options, limit_s=120.0
    )


def check_environment(options: Options) -> bool:
    """Say what is missing before anything fails because of it."""
    lines = [
        "import importlib, importlib.metadata, sys",
        f"needed, missing = {NEEDED!r}, []",
        "for name in needed:",
        "    try: importlib.import_module(name)",
        "    except Exception as exc: missing.append(f'{name}: {exc!r}')",
        "if missing: sys.exit('not importable, add their wheels: ' + '; '.join(missing))",
        "import torch, wbridge",
        f"for name in {DISTRIBUTIONS!r}: print(name, importlib.metadata.version(name))",
        "from wbridge.native.extension import why_missing",
        "print('torch', torch.__version__, 'CUDA', torch.version.cuda, 'GPU', torch.cuda.is_available())",
        "from wbridge.native.ucx import why_missing as why_no_ucx",
        "print('native extension:', why_missing() or 'used')",
        "print('UCX:', why_no_ucx() or 'used')",
        "if not torch.cuda.is_available(): sys.exit('torch sees no GPU')",
        "print(torch.cuda.get_device_name(0))",
    ]
    return run([sys.executable, "-c", "\n".join(lines)], "check", options, limit_s=60.0)


def run_tests(options: Options) -> bool:
    """One process for each file: a GPU that has failed, or a crash, is the end of a process.

    A warning of another release of torch or pytest is shown, not an error.
    """
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "-v"]
    named = [word for word in options.tests if word.startswith("tests/")]
    files = [name for word in named or ("tests/conformance", "tests/gpu") for name in test_files(word)]
    others = [word for word in options.tests if word not in named]
    until_s, failed = time.monotonic() + options.tests_limit_s, list[str]()
    counts: Counter[str] = Counter()
    for number, file in enumerate(files):
        results = options.site.with_suffix(f".{number}.xml")
        results.unlink(missing_ok=True)
        command = [*pytest, "--tb=short", "--durations=5", f"--junitxml={results}", file, *others]
        limit_s = max(until_s - time.monotonic(), 1.0)
        if not run(command, "tests", options, limit_s=min(limit_s, FILE_LIMIT_S), passes=(0, NO_TESTS)):
            failed += failures(results) or [f"{file}: it has left no results"]
        counts.update(outcomes(results))
    for name in failed:
        print(f"FAILED {name}", flush=True)
    print(f"{counts['passed']} passed, {counts['skipped']} skipped, {len(failed)} failed", flush=True)
    return not failed and counts["passed"] > 0


def test_files(name: str) -> list[str]:
    folder = ROOT / name
    if not folder.is_dir():
        return [name]
    return [str(path.relative_to(ROOT)) for path in sorted(folder.glob("test_*.py"))]


def failures(results: Path) -> list[str]:
    bad = [case for case in test_cases(results) if outcome_of(case) == "failed"]
    return [f"{case.get('classname')}::{case.get('name')}" for case in bad]


def outcomes(results: Path) -> list[str]:
    return [outcome_of(case) for case in test_cases(results)]


def test_cases(results: Path) -> list[xml.etree.ElementTree.Element]:
    return list(xml.etree.ElementTree.parse(results).iter("testcase")) if results.exists() else []


def outcome_of(case: xml.etree.ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def run_benchmark(options: Options) -> bool:
    command = [sys.executable, "-m", "benchmarks", "gpu", "--json", str(options.out / "gpu.json")]
    return run([*command, *options.bench], "bench", options, limit_s=options.bench_limit_s)


def run(
    command: list[str], name: str, options: Options, *, limit_s: float, passes: tuple[int, ...] = (0,)
) -> bool:
    """Run a command; show and log what it says. At the limit it ends, with all its children."""
    begin_s = time.monotonic()
    with (options.out / f"{name}.log").open("a") as log:
        print("+", shlex.join(command)[:400], file=log, flush=True)
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=options.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        timer = Limit(child, limit_s)
        assert child.stdout is not None
        for line in child.stdout:
            log.write(line)
            log.flush()
            print(f"{time.monotonic() - begin_s:6.1f} {line}", end="", flush=True)
        code = child.wait()
        timer.cancel()
        if timer.has_passed:
            print(f"{name}: ended after {limit_s:g} s, its limit", flush=True)
            print(f"ended after {limit_s:g} s, its limit", file=log)
    return code in passes and not timer.has_passed


class Limit:
    """Interrupts a process group when its time is up, so that it can report, and kills it soon after."""

    def __init__(self, child: subprocess.Popen[str], limit_s: float) -> None:
        self.has_passed = False
        self._child = child
        self._timers = [threading.Timer(limit_s, self._interrupt)]
        self._timers.append(threading.Timer(limit_s + GRACE_S, self._kill))
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._signal(signal.SIGKILL)  # what the command has left behind

    def _interrupt(self) -> None:
        self.has_passed = True
        self._signal(signal.SIGINT)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)


PARTS: dict[str, Callable[[Options], bool]] = {
    "wheels": install_wheels,
    "build": build_extension,
    "check": check_environment,
    "tests": run_tests,
    "bench": run_benchmark,
}

if __name__ == "__main__":
    sys.exit(main())
