"""Trace the layout of large real models: seconds, memory growth, regions.

    python -m benchmarks discovery --json PATH [--rival]

The vLLM model classes are built at their real size on the meta device, from a `config.json` written here.
Nothing is moved, so there is no bound in bytes; regions cannot be fewer than the checkpoint tensors used.
`--rival` installs the published PyPI package `wbridge` (another project) into a temporary directory and
lets its probe and this package find the layout of one toy model, of a size that the probe can finish.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936,
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KIMI_K2 = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 163840,
    "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 64,
    "num_key_value_heads": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16", "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}, "n_routed_experts": 384,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.827, "norm_topk_prob": True,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CASES = {"qwen3-30b-a3b": QWEN3_30B_A3B, "kimi-k2": KIMI_K2}
TOY = "toy-moe-10m"
RIVAL = "weightbridge-0.1.0"
Row = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--case", choices=[*CASES, TOY], action="append", help="only these cases")
    parser.add_argument("--rival", action="store_true", help="add the published package, on the toy model")
    parser.add_argument("--here", choices=[*CASES, TOY, RIVAL], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure_here(options.here)))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    rows = [row for case in options.case or (*CASES, TOY) for row in in_new_process(case)]
    if options.rival:
        with tempfile.TemporaryDirectory() as directory:
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", directory]
            subprocess.run([*install, "wbridge==0.1.0"], check=True)
            rows += in_new_process(RIVAL, directory)
    for row in rows:
        print(f"{row['case']:14} {row['system']:18} {row['metric']:15} {row['value']:>10} {row['unit']}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def in_new_process(case: str, first_path: str = "") -> list[Row]:
    """Measure in a process of its own: its memory is the case's alone.

    The rival asserts that tensors are on CUDA; `-O` lets its probe run on a CPU, unchanged.
    """
    command = [sys.executable, *(["-O"] if first_path else []), __file__, "--here", case]
    paths = [first_path, str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    *said, rows = done.stdout.splitlines()
    print(*said, sep="\n", end="\n" if said else "")
    decoded: list[Row] = json.loads(rows)
    return decoded


def measure_here(case: str) -> list[Row]:
    import torch

    torch.set_num_threads(1)
    if case == RIVAL:
        return probe_toy_with_rival()
    return trace_toy() if case == TOY else trace_case(case)


def trace_case(case: str) -> list[Row]:
    """Trace one real model class with its parameters on the meta device."""
    import torch

    from tests.models.checkpoints import checkpoint_of
    from tests.models.vllm_rank import vllm_rank

    config = CASES[case]
    checkpoint = checkpoint_of(config, "bfloat16")
    with (
        tempfile.TemporaryDirectory() as directory,
        vllm_rank(config, Path(directory), dtype=torch.bfloat16, device="meta") as model,
    ):
        num_elements = sum(p.numel() for p in model.parameters())
        print(f"{case}: {type(model).__name__} on meta, {num_elements / 1e9:.1f} B parameters")
        return measure(case, checkpoint, dict(model.named_parameters()), model.load_weights)


def measure(case: str, checkpoint: Any, parameters: Any, load_weights: Any) -> list[Row]:
    from wbridge.discovery.trace import trace

    before = reset_peak()
    start = time.perf_counter()
    found = trace(checkpoint=checkpoint, parameters=parameters, load_weights=load_weights)
    elapsed = time.perf_counter() - start
    growth = memory_kb("VmHWM") - before
    if found.untouched or found.source_map.opaque:
        raise SystemExit(f"{case}: not covered: {found.untouched or found.source_map.opaque}")
    values = {
        "trace_s": (round(elapsed, 3), "s"),
        "peak_growth_mb": (round(growth / 1024, 1), "MB"),
        "regions": (len(found.source_map.mapped), "count"),
        "tensors": (len(checkpoint), "count"),
    }
    return [row(case, "wbridge", metric, value, unit) for metric, (value, unit) in values.items()]


def row(case: str, system: str, metric: str, value: float, unit: str) -> Row:
    return {
        "benchmark": "discovery",
        "case": case,
        "system": system,
        "metric": metric,
        "value": value,
        "unit": unit,
    }


def reset_peak() -> int:
    """Forget the peak so far; return the memory in use in kB."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_kb("VmRSS")


def memory_kb(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {field}")


class ToyWorker:
    """Rank 0 of two of a small mixture of experts: fused qkv, stacked experts."""

    layers, hidden, inter, experts, heads, kv_heads, head, vocab = 2, 512, 256, 8, 8, 4, 64, 4000

    def __init__(self) -> None:
        import torch

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.bfloat16)

        h, half = self.hidden, self.inter // 2
        self.parameters = {"embed": zeros(self.vocab // 2, h)}
        for k in range(self.layers):
            self.parameters[f"{k}.qkv"] = zeros((self.heads + 2 * self.kv_heads) // 2 * self.head, h)
            self.parameters[f"{k}.o"] = zeros(h, self.heads // 2 * self.head)
            self.parameters[f"{k}.w13"] = zeros(self.experts, 2 * half, h)
            self.parameters[f"{k}.w2"] = zeros(self.experts, h, half)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        h, head = self.hidden, self.head
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab, h)}
        for k in range(self.layers):
            shapes |= {f"{k}.q": (self.heads * head, h), f"{k}.o": (h, self.heads * head)}
            shapes |= {f"{k}.{name}": (self.kv_heads * head, h) for name in ("k", "v")}
            for e in range(self.experts):
                shapes |= {f"{k}.{e}.{name}": (self.inter, h) for name in ("gate", "up")}
                shapes[f"{k}.{e}.down"] = (h, self.inter)
        return shapes

    def load(self, get: Callable[[str], Any]) -> None:
        p, q, kv = self.parameters, self.heads // 2 * self.head, self.kv_heads // 2 * self.head
        half = self.inter // 2
        p["embed"].copy_(get("embed")[: self.vocab // 2])
        for k in range(self.layers):
            p[f"{k}.qkv"][:q].copy_(get(f"{k}.q")[:q])
            p[f"{k}.qkv"][q : q + kv].copy_(get(f"{k}.k")[:kv])
            p[f"{k}.qkv"][q + kv :].copy_(get(f"{k}.v")[:kv])
            p[f"{k}.o"].copy_(get(f"{k}.o")[:, :q])
            for e in range(self.experts):
                p[f"{k}.w13"][e, :half].copy_(get(f"{k}.{e}.gate")[:half])
                p[f"{k}.w13"][e, half:].copy_(get(f"{k}.{e}.up")[:half])
                p[f"{k}.w2"][e].copy_(get(f"{k}.{e}.down")[:, :half])


def trace_toy() -> list[Row]:
    from wbridge.layout.source_map import TensorSpec

    worker = ToyWorker()

    def load_weights(weights: Iterable[tuple[str, Any]]) -> None:
        worker.load(dict(weights).__getitem__)

    checkpoint = {name: TensorSpec(shape, "bfloat16") for name, shape in worker.shapes().items()}
    return measure(TOY, checkpoint, worker.parameters, load_weights)


def probe_toy_with_rival() -> list[Row]:
    import torch
    from wbridge.utils import specgen

    worker = ToyWorker()
    shapes = worker.shapes()
    weights = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    fetchers = {name: (lambda tensor=tensor: tensor) for name, tensor in weights.items()}
    worker.load(weights.__getitem__)
    before = reset_peak()
    start = time.perf_counter()
    specgen.infer_load_spec(
        fetchers, shapes, lambda: worker.parameters, lambda fetch: worker.load(lambda name: fetch[name]())
    )
    elapsed = time.perf_counter() - start
    growth = memory_kb("VmHWM") - before
    return [
        row(TOY, RIVAL, "trace_s", round(elapsed, 3), "s"),
        row(TOY, RIVAL, "peak_growth_mb", round(growth / 1024, 1), "MB"),
        row(TOY, RIVAL, "tensors", len(shapes), "count"),
    ]


if __name__ == "__main__":
    main()
