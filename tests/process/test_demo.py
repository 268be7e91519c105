"""The tutorial's loop learns, in every mode, and its engines run on exactly the trainer's weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.links.hosts import why_not
from tests.models.installed import needs

pytestmark = [pytest.mark.backend, pytest.mark.process, pytest.mark.slow, needs("vllm"), needs("rich")]

DEMO = Path(__file__).parents[2] / "docs" / "tutorial" / "rl_loop"
MODES = ("sync", "sender_overlap", "receiver_overlap", "async")
LIMIT_S = 240


def run_demo(tmp_path: Path, *arguments: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, str(DEMO), "--json", str(numbers), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    found: dict[str, Any] = json.loads(numbers.read_text())
    return found


@pytest.fixture(scope="module")
def by_mode(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One program runs all modes: its processes come from one that has imported vLLM once."""
    path = tmp_path_factory.mktemp("modes")
    return run_demo(path, "--compare-modes", *MODES, "--steps", "25", limit_s=2 * LIMIT_S)


@pytest.mark.timeout(2 * LIMIT_S + 10)
@pytest.mark.parametrize("mode", MODES)
def test_the_policy_learns_and_every_rollout_follows_bit_for_bit(mode: str, by_mode: dict[str, Any]) -> None:
    found = by_mode[mode]
    assert found["reward_last"] >= 2 * found["reward_first"]
    assert found["bit_exact"] == 1
    assert found["versions_sent"] >= 26 and found["versions_applied"] >= 2
    assert 1.0 <= found["egress_copies"] <= 1.01


@pytest.mark.timeout(LIMIT_S + 10)
def test_without_updates_the_reward_does_not_rise(tmp_path: Path) -> None:
    found = run_demo(tmp_path, "--no-sync", "--steps", "20")
    assert found["reward_last"] <= found["reward_first"] + 1
    assert (found["versions_sent"], found["versions_applied"], found["bit_exact"]) == (1, 1, 0)


@pytest.mark.timeout(LIMIT_S + 10)
def test_a_trainer_and_an_engine_share_a_process(tmp_path: Path) -> None:
    found = run_demo(tmp_path, "--colocated", "--mode", "sync", "--steps", "10")
    assert found["bit_exact"] == 1 and found["egress_copies"] <= 1.01


@pytest.mark.timeout(LIMIT_S + 10)
def test_a_hundred_megabytes_arrive_bit_for_bit(tmp_path: Path) -> None:
    found = run_demo(tmp_path, "--size", "medium", "--steps", "2")
    assert found["bit_exact"] == 1 and 1.0 <= found["egress_copies"] <= 1.01


@pytest.mark.timeout(2 * LIMIT_S + 10)
def test_on_a_slow_link_async_makes_more_steps_than_sync(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    comparison = ("--link-mbit", "8", "--compare-modes", "sync", "async", "--steps", "8")
    found = run_demo(tmp_path, *comparison, limit_s=2 * LIMIT_S)
    assert found["async"]["steps_per_s"] > found["sync"]["steps_per_s"]
    assert found["async"]["trainer_stall_ms"] < 0.5 * found["sync"]["trainer_stall_ms"]
    assert found["async"]["rollout_stall_ms"] < 0.5 * found["sync"]["rollout_stall_ms"]
    assert found["sync"]["bit_exact"] == found["async"]["bit_exact"] == 1
    for mode in ("sync", "async"):  # a copy for two engines, also of versions that come one upon the other
        assert found[mode]["egress_copies"] <= 0.7
