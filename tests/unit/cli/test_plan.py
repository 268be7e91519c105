"""`wbridge plan`, through the command: saved plans and descriptions, no GPU and no weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from tests.unit.control.test_planning import hosts, joined
from wbridge.cli.main import main
from wbridge.cli.plan import Shown
from wbridge.config import Config
from wbridge.control.planning import build_planned, restored
from wbridge.plan.difference import Difference
from wbridge.plan.report import Report

CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32, "vocab_size": 128,
}  # fmt: skip
TRAINERS, ROLLOUTS = ["--trainers", "4,pp=2,tp=2,ep=2"], ["--rollouts", "2x4,tp=4,ep=4"]
JOB = """
model = "config.json"
gpus_per_host = 4
nics_per_host = 2
nic_gb_s = 25

[trainers]
workers = 4
pp = 2
tp = 2

[[rollouts]]
engines = 2
workers = 4
tp = 4

[[links]]
hosts = "rollout-host000"
nics = 1
gb_s = 5
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    return str(tmp_path / "config.json")


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_show_a_description_and_save_it(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, picture = tmp_path / "a.plan", tmp_path / "a.svg"
    text = ran(capsys, "show", model, *TRAINERS, *ROLLOUTS, "--save", str(saved), "--svg", str(picture))
    assert "12 workers on 3 hosts" not in text  # eight GPUs on a host by default
    assert "12 workers on 2 hosts" in text
    assert sum("|" in line for line in text.splitlines()) == 11  # a row for each who writes
    shown = msgspec.json.decode(ran(capsys, "show", str(saved), "--json"), type=Shown)
    assert shown.fingerprint == restored(saved.read_bytes()).fingerprint
    assert shown.fingerprint[:12] in text
    sums = [sum(row) for row in shown.traffic.nbytes]
    by_name = {group.name: group for group in shown.groups}
    assert sum(sums) == sum(group.sent_nbytes for group in shown.groups)
    report = msgspec.json.decode(ran(capsys, "explain", str(saved), "--json"), type=Report)
    assert (
        by_name["trainer/train"].sent_nbytes == report.explanation.model_nbytes
    )  # rollouts pass the rest on
    passed_on = {name: group.sent_nbytes for name, group in by_name.items() if name != "trainer/train"}
    assert all(passed_on.values()) and sum(passed_on.values()) == report.explanation.relayed_nbytes
    assert sum(sums) == sum(group.got_nbytes for group in shown.groups)
    cells = [e for e in ElementTree.parse(picture).iter() if e.tag.endswith("rect") and len(e)]
    titles = [cell[0].text or "" for cell in cells]
    assert len(cells) == 11 * 8
    assert any(title.startswith("trainer/train[0] -> rollout/engine0.000[0]: ") for title in titles)


def test_axes_sum_to_the_same(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    sums = set()
    for by in ("worker", "host", "group"):
        out = ran(capsys, "show", model, *TRAINERS, *ROLLOUTS, "--by", by, "--gpus-per-host", "2", "--json")
        traffic = msgspec.json.decode(out, type=Shown).traffic
        assert traffic.by == by
        sums.add(sum(map(sum, traffic.nbytes)))
        assert len(traffic.columns) == {"worker": 8, "host": 4, "group": 2}[by]
    assert len(sums) == 1


def test_explain_names_bound_loads_and_who_is_on_the_busiest_link(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    report = msgspec.json.decode(ran(capsys, "explain", str(job), "--json"), type=Report)
    told = report.explanation
    assert report.busiest is not None and report.busiest.link == "rollout-host000/nic0"
    assert report.reason == "what one rollout host needs, over its ingress"
    assert told.bound.relayed_s == told.bound.host_ingress_s
    assert sum(carried.nbytes for carried in report.carried) == report.busiest.nbytes
    assert sum(carried.share for carried in report.carried) == pytest.approx(1)
    assert {c.name: c.num_links for c in report.classes} == {
        "trainer egress": 2, "rollout egress": 2, "rollout ingress": 3, "inside a host": 8,
    }  # fmt: skip
    assert set(told.ingress_nbytes.values()) == {told.model_nbytes}  # each element once
    text = ran(capsys, "explain", str(job), "--top", "2")
    assert "lower bound" in text and f"ratio {told.ratio:.3f}" in text
    assert f"{told.copies_sent:.2f} copies" in text
    assert f"and {len(report.carried) - 2} more pairs" in text


def test_a_saved_plan_says_nothing_of_links_until_it_is_told(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "a.plan"
    ran(capsys, "show", model, *TRAINERS, *ROLLOUTS, "--save", str(saved))
    assert "nothing is known of the links" in ran(capsys, "explain", str(saved))
    report = msgspec.json.decode(
        ran(capsys, "explain", str(saved), "--nics-per-host", "8", "--json"), type=Report
    )
    loads = {(load.link, load.direction): load.nbytes for load in report.explanation.loads}
    assert set(loads) == {
        *((f"trainer-host000/nic{2 * k}", "egress") for k in range(4)),
        *(
            (f"rollout-host000/nic{k}", "ingress") for k in range(7)
        ),  # what seven sets of ranks need: a group each
    }
    assert sum(loads.values()) == 2 * report.explanation.model_nbytes
    assert report.explanation.ratio < 1.01
    assert "rollout-host000/nic0" in ran(capsys, "explain", str(tmp_path), "--nics-per-host", "1", "--json")


def test_what_a_coordinator_has_cached_can_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_planned(joined(), hosts(), Config(cache_dir=str(tmp_path)))
    (cached,) = tmp_path.glob("*.plan")
    shown = msgspec.json.decode(ran(capsys, "show", str(tmp_path), "--json"), type=Shown)
    assert shown.fingerprint == restored(cached.read_bytes()).fingerprint
    assert shown.num_workers == len(joined())
    assert "busiest link" in ran(capsys, "explain", str(cached))


def test_diff_of_an_engine_that_joins_and_one_that_leaves(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def diff(*arguments: str) -> Difference:
        return msgspec.json.decode(ran(capsys, "diff", *arguments, "--json"), type=Difference)

    joins = diff(model, *TRAINERS, *ROLLOUTS, "--then-rollouts", "3x4,tp=4,ep=4")
    assert joins.joined == tuple(f"rollout/engine0.002[{k}]" for k in range(4))
    assert joins.left == () and joins.removed_nbytes == 0 and joins.added_nbytes > 0
    assert 2 * joins.transfers_after == 3 * joins.transfers_before
    assert any(pair.writer.startswith("rollout/") and pair.nbytes_after for pair in joins.pairs)
    one, two = tmp_path / "one.plan", tmp_path / "two.plan"
    ran(capsys, "show", model, *TRAINERS, "--rollouts", "1x4,tp=4,ep=4", "--save", str(one))
    ran(capsys, "show", model, *TRAINERS, *ROLLOUTS, "--save", str(two))
    leaves = diff(str(two), str(one))
    assert (leaves.removed_nbytes, leaves.added_nbytes) == (joins.added_nbytes, 0)
    assert diff(str(two), str(two)).pairs == ()


def test_diff_of_another_parallelism_moves_bytes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = ran(capsys, "diff", model, *TRAINERS, *ROLLOUTS, "--then-trainers", "4,tp=4", "--top", "1")
    moved = msgspec.json.decode(
        ran(capsys, "diff", model, *TRAINERS, *ROLLOUTS, "--then-trainers", "4,tp=4", "--json"),
        type=Difference,
    )
    assert (moved.added_nbytes, moved.removed_nbytes) == (0, 0) and moved.moved_nbytes > 0
    assert f"{len(moved.pairs) - 1} more pairs" in text and "come from another writer" in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["show", "Qwen4"], ["says nothing of trainers", "--trainers GROUP"]),
        (["show", "Qwen4", *TRAINERS, *ROLLOUTS], ["'Qwen4'", "Qwen3-30B-A3B", "config.json"]),
        (["show", "MODEL", "--trainers", "4,pp=3", *ROLLOUTS], ["trainers", "workers = 4", "pp x tp = 3"]),
        (["show", "MODEL", "--trainers", "4,pq=3", *ROLLOUTS], ["--trainers", "`pq`", "pp, tp, ep"]),
        (["show", "MODEL", "--trainers", "4,tp", *ROLLOUTS], ["'tp' has no value"]),
        (["show", "MODEL", "--trainers", "2x4", *ROLLOUTS], ["trainers: engines = 2"]),
        (["show", "MODEL", *TRAINERS, "--rollouts", "4,tp=0"], ["rollouts: tp = 0"]),
        (["show", "MODEL", *TRAINERS, "--rollouts", "many"], ["--rollouts", "`$.workers`"]),
        (["show", "MODEL", *TRAINERS, *ROLLOUTS, "--nic-gb-s", "0"], ["nic_gb_s = 0"]),
        (["show", "MODEL", *TRAINERS, *ROLLOUTS, "--gpus-per-host", "0"], ["gpus_per_host = 0"]),
        (["show", "MODEL", *TRAINERS, *ROLLOUTS, "--svg", "/absent/a.svg"], ["/absent/a.svg"]),
        (["diff", "MODEL", *TRAINERS, *ROLLOUTS], ["AFTER is missing", "--then-rollouts"]),
        (["show", "DAMAGED"], ["not a saved plan, or damaged"]),
        (["show", "EMPTY"], ["no saved plan", "cache_dir"]),
        (["show", "JOB"], ["`nics`", "$.trainers"]),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(
    arguments: list[str], parts: list[str], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, empty, job = tmp_path / "damaged.plan", tmp_path / "empty", tmp_path / "job.toml"
    damaged.write_bytes(b"?" * 100)
    empty.mkdir()
    job.write_text(JOB.replace("pp = 2", "nics = 2"))
    named = {"MODEL": model, "DAMAGED": str(damaged), "EMPTY": str(empty), "JOB": str(job)}
    assert main(["plan", *(named.get(word, word) for word in arguments)]) == 1
    error = capsys.readouterr().err
    assert all(part in error for part in parts), error


def test_options_of_a_description_do_not_go_with_a_saved_plan(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "a.plan")
    ran(capsys, "show", model, *TRAINERS, *ROLLOUTS, "--save", saved)
    assert main(["plan", "show", saved, *TRAINERS]) == 1
    assert "saved plan, so --trainers changes nothing" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["num_hidden_layers", "vocab_size", "moe_intermediate_size"])
def test_a_config_without_a_field_is_refused(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(msgspec.json.encode({k: v for k, v in CONFIG.items() if k != missing}))
    assert main(["plan", "show", str(path), *TRAINERS, *ROLLOUTS]) == 1
    assert missing in capsys.readouterr().err


@pytest.mark.process
def test_a_reader_that_has_seen_enough_is_no_error(model: str) -> None:
    command = f"{sys.executable} -m wbridge.cli.main plan show {model} {' '.join(TRAINERS + ROLLOUTS)} | true"
    shown = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30, check=False)
    assert shown.stderr == ""


@pytest.mark.process
def test_as_a_process_of_its_own(model: str) -> None:
    command = [sys.executable, "-m", "wbridge.cli.main", "plan", "explain", model, *TRAINERS, *ROLLOUTS]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=os.environ)
    assert shown.returncode == 0, shown.stderr
    assert "rollout ingress" in shown.stdout
    wrong = subprocess.run(
        [*command, "--nics-per-host", "-1"], capture_output=True, text=True, timeout=30, check=False
    )
    assert wrong.returncode == 1 and "Traceback" not in wrong.stderr
