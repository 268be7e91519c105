"""The task and the settings: which policy learns what, and how the processes split the work."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", *LETTERS]
VOCABULARY_SIZE = len(WORDS)
TARGET = WORDS.index("a")
NUM_NEW_TOKENS = 12
"""The best reward: every new token is the target."""

PORT = 7717
"""Where the coordinator listens when the processes live on several hosts."""

GROUP_SIZE = 16
"""Samples of one prompt; each is judged against the others of its group."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line chooses; every process gets the same."""

    mode: str
    steps: int
    sync: bool
    colocated: bool
    size: str
    directory: Path
    hosts: Mapping[str, Any]
    """By role, if the two live on hosts of their own: see `links.py`."""
    num_trainers: int = 2
    num_engines: int = 2

    @property
    def rendezvous(self) -> str:
        if self.hosts:
            return f"tcp://{self.hosts['trainer'].address}:{PORT}"
        return f"file://{self.directory}/rendezvous"

    @property
    def model_directory(self) -> Path:
        return self.directory / "model"

    @property
    def trained_directory(self) -> Path:
        return self.directory / "trained"

    def enter_host(self, role: str) -> None:
        """Move this process to the host of its role, before it does anything else."""
        if self.hosts:
            self.hosts[role].enter()

    @property
    def groups_per_step(self) -> int:
        """Groups that one trainer learns from in one step."""
        return 2 if self.size == "tiny" else 1


@dataclasses.dataclass(frozen=True)
class Group:
    """Samples of one prompt, on their way from an engine to a trainer."""

    prompt: list[int]
    samples: list[list[int]]
    version: int
    """The oldest weights that computed any of them."""


def encode(text: str) -> list[int]:
    return [WORDS.index("<bos>"), *(WORDS.index(letter) for letter in text)]


def decode(tokens: list[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def random_prompt(source: random.Random) -> list[int]:
    return encode("".join(source.choices(LETTERS, k=3)))


def reward(sample: list[int]) -> float:
    """Count the tokens that are the letter `a`."""
    return float(sample.count(TARGET))


def policy_config(size: str) -> Any:
    """Return the config of a small Qwen3; `medium` has more than 100 MB of weights."""
    from transformers import Qwen3Config

    hidden, inner, layers = (64, 96, 2) if size == "tiny" else (512, 1536, 7)
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=WORDS.index("<bos>"),
        eos_token_id=WORDS.index("<eos>"),
        pad_token_id=WORDS.index("<pad>"),
        initializer_range=0.3 if size == "tiny" else 0.05,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.dtype = "float32"
    return config
