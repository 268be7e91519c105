"""Checkpoint names and shapes of real architectures, from their `config.json` fields, at any size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wbridge.layout.source_map import TensorSpec

TINY = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TINY_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
TINY_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


def tiny_config(architecture: str) -> dict[str, Any]:
    """Return the fields of `config.json` for a model of about a hundred thousand parameters."""
    return {
        "qwen3": TINY | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        "qwen3_tied": TINY
        | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
        "qwen3_moe": TINY | TINY_MOE | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
        "llama": TINY | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        "deepseek_v3": {k: v for k, v in TINY.items() if k != "head_dim"}
        | TINY_MLA
        | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
        "gemma3": TINY
        | {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    }[architecture]


def checkpoint_of(config: Mapping[str, Any], dtype: str = "float32") -> dict[str, TensorSpec]:
    """Return the tensors that Hugging Face stores for a model with that config."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention = _mla(config) if "kv_lora_rank" in config else _attention(config)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if config["model_type"] == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        parts = {
            **{f"self_attn.{name}.weight": shape for name, shape in attention.items()},
            **{f"{name}.weight": (hidden,) for name in norms},
            **_mlp(config, layer),
        }
        shapes |= {prefix + name: shape for name, shape in parts.items()}
    return {name: TensorSpec(shape, dtype) for name, shape in shapes.items()}


def _attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj": (heads * head, hidden),
        "k_proj": (kv_heads * head, hidden),
        "v_proj": (kv_heads * head, hidden),
        "o_proj": (hidden, heads * head),
    }
    if config["model_type"] != "llama":
        shapes |= {"q_norm": (head,), "k_norm": (head,)}
    return shapes


def _mla(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    return {
        "q_a_proj": (q_rank, hidden),
        "q_a_layernorm": (q_rank,),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, hidden),
        "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (heads * (nope + value), kv_rank),
        "o_proj": (hidden, heads * value),
    }


def _mlp(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    experts = config.get("num_experts") or config.get("n_routed_experts") or 0
    if not experts or layer < config.get("first_k_dense_replace", 0):
        return _gated("mlp.", hidden, config["intermediate_size"])
    shapes = {"mlp.gate.weight": (experts, hidden)}
    if config.get("topk_method") == "noaux_tc":
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    if config.get("n_shared_experts"):
        shapes |= _gated(
            "mlp.shared_experts.", hidden, config["n_shared_experts"] * config["moe_intermediate_size"]
        )
    for expert in range(experts):
        shapes |= _gated(f"mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
    return shapes


def _gated(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }
