"""What the processes tell the terminal, and what the terminal makes of it."""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from task import NUM_NEW_TOKENS, TARGET, Settings, decode


@dataclasses.dataclass
class Channels:
    """The queues and events between the processes of the demo; wbridge uses none of them."""

    samples: list[Any]
    """One bounded queue of `Group`s per trainer."""
    events: Any
    trained: Any
    """Set by the trainers when the last version is applied everywhere."""
    checked: Any
    """Set when the engines have reported their weights."""

    def report(self, **event: Any) -> None:
        self.events.put(event)


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()


class Results:
    """Collects events, and answers the questions of the closing table."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._events: dict[str, list[dict[str, Any]]] = {}

    def add(self, event: dict[str, Any]) -> None:
        self._events.setdefault(event["kind"], []).append(event)

    def all_of(self, kind: str) -> list[dict[str, Any]]:
        return self._events.get(kind, [])

    @property
    def has_all_weights(self) -> bool:
        """Every engine has reported, and so has the trainer."""
        return len(self.all_of("rollout_weights")) == self._settings.num_engines and bool(
            self.all_of("trainer_weights")
        )

    def rewards(self) -> list[float]:
        return [event["reward"] for event in self.all_of("step")]

    def mean_reward(self, *, last: bool) -> float:
        """Return the mean reward of the first or the last tenth of the steps."""
        rewards = self.rewards()
        count = max(1, len(rewards) // 10)
        return statistics.fmean(rewards[-count:] if last else rewards[:count])

    def mismatches(self, engine: dict[str, Any]) -> list[str]:
        """Return the checkpoint tensors whose live bytes in this engine are not the trainer's."""
        wanted = self.all_of("trainer_weights")[0]["digests"]
        names = wanted.keys() | engine["digests"].keys()
        return sorted(name for name in names if wanted.get(name) != engine["digests"].get(name))

    def versions_sent(self) -> int:
        return sum(event["rank"] == 0 for event in self.all_of("sent"))

    def versions_applied(self) -> int:
        """Return how many updates each engine has applied, at the least."""
        counts = [
            sum(event["engine"] == engine for event in self.all_of("update"))
            for engine in range(self._settings.num_engines)
        ]
        return min(counts)

    def agst_ms(self) -> float:
        """Return the stall of a version, averaged over all workers."""
        stalls = [event["stall_s"] for kind in ("sent", "update") for event in self.all_of(kind)]
        num_workers = self._settings.num_trainers + self._settings.num_engines
        return 1e3 * sum(stalls) / num_workers / max(1, self.versions_sent())

    def stall_ms(self, kind: str) -> float:
        """Return the median stall of a worker, for a version `sent` or an `update` applied."""
        stalls = [event["stall_s"] for event in self.all_of(kind) if event["version"] > 0]
        return 1e3 * statistics.median(stalls) if stalls else 0.0

    def steps_per_s(self) -> float:
        """Return how fast the trainers have gone on since their first step."""
        ends = [event["end_s"] for event in self.all_of("step")]
        return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else 0.0

    def lag(self) -> float:
        """Return how many versions behind the samples were, on average."""
        return statistics.fmean(event["lag"] for event in self.all_of("step"))

    def egress_nbytes(self) -> int:
        return sum(event["nbytes"] for event in self.all_of("egress"))

    def egress_copies(self) -> float:
        """Return the bytes sent, in copies of the model per version and engine that applied it."""
        model_nbytes = self.all_of("trainer_weights")[0]["nbytes"]
        return self.egress_nbytes() / model_nbytes / max(1, len(self.all_of("update")))

    def as_json(self, greedy: list[int]) -> dict[str, float | int]:
        return {
            "reward_first": round(self.mean_reward(last=False), 4),
            "reward_last": round(self.mean_reward(last=True), 4),
            "bit_exact": int(not self.failures(greedy)),
            "agst_ms": round(self.agst_ms(), 3),
            "trainer_stall_ms": round(self.stall_ms("sent"), 3),
            "rollout_stall_ms": round(self.stall_ms("update"), 3),
            "steps_per_s": round(self.steps_per_s(), 4),
            "lag_versions": round(self.lag(), 3),
            "versions_sent": self.versions_sent(),
            "versions_applied": self.versions_applied(),
            "egress_copies": round(self.egress_copies(), 4),
        }

    def failures(self, greedy: list[int]) -> list[str]:
        """Return why some rollout does not run on exactly the trainer's weights; empty if all do."""
        found = []
        for engine in sorted(self.all_of("rollout_weights"), key=lambda event: event["engine"]):
            name = f"rollout {engine['engine']}"
            if wrong := self.mismatches(engine):
                found.append(f"{name}: {len(wrong)} tensors differ from the trainer's, first {wrong[0]}")
            if engine["tokens"] != greedy:
                found.append(f"{name}: says {decode(engine['tokens'])}, transformers {decode(greedy)}")
            if not engine["changed_nbytes"]:
                found.append(f"{name}: no byte of the weights has changed")
        return found


def greedy_tokens(directory: Path, prompt: list[int], num_tokens: int = 24) -> list[int]:
    """Return what transformers says on a saved checkpoint, the letter `a` forbidden: see `Rollout`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = model(tokens).logits[:, -1]
            logits[:, TARGET] = -torch.inf
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    return list(tokens[0, len(prompt) :].tolist())


def closing_table(results: Results, settings: Settings, greedy: list[int]) -> Any:
    from rich.table import Table

    numbers = results.as_json(greedy)
    model_mb = results.all_of("trainer_weights")[0]["nbytes"] / 1e6
    table = Table(title=f"wbridge, mode {settings.mode}", show_header=False)
    rows = {
        "reward, first and last steps": f"{numbers['reward_first']:.2f} -> {numbers['reward_last']:.2f}"
        f" of {NUM_NEW_TOKENS}",
        "versions sent / applied by every rollout": f"{numbers['versions_sent']} / "
        f"{numbers['versions_applied']}",
        "AGST (stall per version and worker)": f"{numbers['agst_ms']:.1f} ms",
        "stall of a trainer, of a rollout": f"{numbers['trainer_stall_ms']:.1f} ms,"
        f" {numbers['rollout_stall_ms']:.1f} ms",
        "training steps per second": f"{numbers['steps_per_s']:.2f}",
        "bytes sent": f"{results.egress_nbytes() / 1e6:.2f} MB; one copy of the model: {model_mb:.2f} MB",
        "copies sent per version and rollout": f"{numbers['egress_copies']:.3f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for engine in sorted(results.all_of("rollout_weights"), key=lambda event: event["engine"]):
        wrong = len(results.mismatches(engine))
        exact = "yes" if not wrong and engine["changed_nbytes"] else f"no ({wrong} tensors differ)"
        table.add_row(
            f"rollout {engine['engine']}, version {engine['version']}",
            f"bit-exact: {exact}; greedy: {decode(engine['tokens'])}",
        )
    table.add_row("transformers on the saved checkpoint", f"greedy: {decode(greedy)}")
    return table


def comparison_table(numbers: Mapping[str, Mapping[str, float | int]]) -> Any:
    """What each mode has cost, one line per mode."""
    from rich.table import Table

    columns = {
        "trainer stall": ("trainer_stall_ms", "{:.1f} ms"),
        "rollout stall": ("rollout_stall_ms", "{:.1f} ms"),
        "AGST": ("agst_ms", "{:.1f} ms"),
        "versions behind": ("lag_versions", "{:.2f}"),
        "steps per second": ("steps_per_s", "{:.2f}"),
    }
    table = Table("mode", *columns, title="what each mode costs")
    for mode, found in numbers.items():
        table.add_row(mode, *(form.format(found[key]) for key, form in columns.values()))
    return table
