"""A running AsyncLLM follows a trainer between its steps, with requests in flight."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.backend, pytest.mark.process, pytest.mark.slow]
pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
LIMIT_S = 180


@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize(
    ("architecture", "weights", "mode", "size"),
    [
        ("qwen3", "raw", "async", 1),
        ("qwen3", "packed", "sync", 1),
        ("qwen3", "raw", "sync", 2),
        ("qwen3_moe", "raw", "sender_overlap", 1),
        ("qwen3_moe", "packed", "receiver_overlap", 1),
    ],
)
def test_c30_c43_a_running_engine_follows_with_requests_in_flight(
    architecture: str, weights: str, mode: str, size: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.process.vllm_follow"]
    command += [str(tmp_path), architecture, weights, mode, str(size)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-5000:]
    found = json.loads((tmp_path / "result.json").read_text())
    wanted = found["wanted"]
    assert [found["first"], found["second"], found["third"]] == wanted[1:]
    assert len({tuple(tokens) for tokens in wanted}) == 4
    assert found["long"] == [200] * 3
    for spans in found["spans"]:
        assert [version for version, _ in spans] == [1, 2]
        assert sum(count for _, count in spans) == found["prompt"] + 200 - 1
    assert found["first_spans"] == [[1, found["prompt"] + len(found["first"]) - 1]]
    assert found["third_spans"][0][0] == 3 and found["label"] == "three"
    assert [list(outcome.values()) for outcome in found["outcomes"]] == [["applied"]] * 3
