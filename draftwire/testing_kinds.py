"""Configs of tiny models whose caches are more than keys and values: windows, chunks, recurrent state, nested caches.

They are as small as the real mlx-lm classes run with, and keep every kind of layer that the family has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias

CacheKind: TypeAlias = Literal[
    "gpt_oss",
    "ministral3",
    "cohere2",
    "llama4",
    "qwen3_next",
    "qwen3_5",
    "falcon_h1",
    "lfm2",
    "jamba",
    "mamba",
    "mamba2",
    "recurrent_gemma",
    "baichuan_m1",
    "longcat_flash",
    "deepseek_v32",
]

_Config: TypeAlias = dict[str, Any]


def config_of(kind: str, base: Mapping[str, Any], window: int) -> _Config:
    """The config of a kind. base: what all kinds share (sizes, vocabulary, context). window: tokens that sliding layers see."""
    return {**base, "model_type": kind, **_CONFIGS[kind](dict(base), window)}


def _layer_types(sliding: int, full: int) -> list[str]:
    return ["sliding_attention"] * sliding + ["full_attention"] * full


def _gpt_oss(base: _Config, window: int) -> _Config:
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return {**experts, "num_hidden_layers": 4, "layer_types": types, "sliding_window": window, "head_dim": 16}


def _ministral3(base: _Config, window: int) -> _Config:
    rope = {
        "rope_theta": 10_000.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 64,
        "type": "default",
    }
    types = _layer_types(2, 1)
    return {
        "num_hidden_layers": 3,
        "layer_types": types,
        "sliding_window": window,
        "rope_parameters": rope,
        "head_dim": 16,
    }


def _cohere2(base: _Config, window: int) -> _Config:
    sliding = {"sliding_window": window, "sliding_window_pattern": 2, "num_hidden_layers": 4}
    return {**sliding, "head_dim": 16, "layer_norm_eps": 1e-5, "logit_scale": 1.0}


def _llama4(base: _Config, window: int) -> _Config:
    text = {
        **base,
        "model_type": "llama4_text",
        "attention_bias": False,
        "attention_chunk_size": window,
        "head_dim": 16,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 2 * base["hidden_size"],
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "num_local_experts": 2,
        "rope_scaling": None,
        "use_qk_norm": True,
    }
    return {"text_config": text}


def _linear(base: _Config) -> _Config:
    return {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.5,
    }


def _qwen3_next(base: _Config, window: int) -> _Config:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    return _linear(base) | experts


def _qwen3_5(base: _Config, window: int) -> _Config:
    rope = {"type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    return _linear(base) | {"rope_parameters": rope}


def _falcon_h1(base: _Config, window: int) -> _Config:
    return {
        "head_dim": 16,
        "num_hidden_layers": 2,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
        "lm_head_multiplier": 1.0,
        "tie_word_embeddings": False,
    }


def _lfm2(base: _Config, window: int) -> _Config:
    block = {
        "block_dim": base["hidden_size"],
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    }
    return {
        **block,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "num_hidden_layers": 3,
        "full_attn_idxs": [1],
    }


def _jamba(base: _Config, window: int) -> _Config:
    experts = {"expert_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2, "num_experts_per_tok": 1}
    mamba = {"mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2}
    return {**experts, **mamba, "attn_layer_offset": 1, "attn_layer_period": 2, "num_hidden_layers": 4}


def _mamba(base: _Config, window: int) -> _Config:
    return {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": "auto"}


def _mamba2(base: _Config, window: int) -> _Config:
    heads = {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16}
    steps = {"time_step_limit": [0.0, 100.0], "time_step_rank": "auto", "layer_norm_epsilon": 1e-5}
    return _mamba(base, window) | heads | steps


def _recurrent_gemma(base: _Config, window: int) -> _Config:
    return {
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "attention_window_size": window,
        "block_types": ["recurrent", "recurrent", "attention"],
    }


def _baichuan_m1(base: _Config, window: int) -> _Config:
    return {"sliding_window": window, "sliding_window_layers": [1, 3], "conv_window": 2, "num_hidden_layers": 4}


def _latent(base: _Config) -> _Config:
    return {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}


def _longcat_flash(base: _Config, window: int) -> _Config:
    return _latent(base) | {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 64,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "num_layers": 2,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "attention_bias": False,
    }


def _deepseek_v32(base: _Config, window: int) -> _Config:
    # Sparse attention sees the `window` keys that its indexer finds best.
    indexer = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": window}
    experts = {"moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
    return (
        _latent(base)
        | indexer
        | experts
        | {"first_k_dense_replace": 1, "num_key_value_heads": base["num_attention_heads"]}
    )


_CONFIGS: Final[Mapping[str, Callable[[_Config, int], _Config]]] = {
    "gpt_oss": _gpt_oss,
    "ministral3": _ministral3,
    "cohere2": _cohere2,
    "llama4": _llama4,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "falcon_h1": _falcon_h1,
    "lfm2": _lfm2,
    "jamba": _jamba,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "recurrent_gemma": _recurrent_gemma,
    "baichuan_m1": _baichuan_m1,
    "longcat_flash": _longcat_flash,
    "deepseek_v32": _deepseek_v32,
}
