"""Small models of each family with seeded random weights, and the same with other dtypes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
VOCABULARY = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # The usual 0.02 makes a model whose layers hardly act.
    "initializer_range": 0.1,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
_GATED_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": ROPE,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_MROPE = {"rope_parameters": ROPE | {"mrope_section": [1, 1, 0]}}

_THREE_TO_ONE = ["linear_attention"] * 3 + ["full_attention"]
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}

# Family -> name of its configuration, name of its model, what its configuration says beyond the common part.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _GATED_DELTA | _MROPE),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _GATED_DELTA | _MROPE | _EXPERTS),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _GATED_DELTA | _EXPERTS),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {"linear_key_head_dim": 12, "linear_value_head_dim": 24, "linear_num_key_heads": 4, "linear_num_value_heads": 4},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "mlp_layer_types": ["dense"] * 4,
            "linear_head_dim": 8,
            "linear_num_heads": 3,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8, "expand": 2},
    ),
    "bamba": ("BambaConfig", "BambaForCausalLM", _MAMBA2 | {"attn_layer_indices": [3]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        _MAMBA2 | {"layer_types": _THREE_TO_ONE, "shared_intermediate_size": 32, "num_local_experts": 4},
    ),
}


def tiny_model(family: str = "qwen3_5", seed: int = 0, **options: Any) -> PreTrainedModel:
    """Return a float32 model of ``family`` in evaluation mode, with ``options`` in its configuration."""
    config_name, model_name, own = FAMILIES[family]
    config = getattr(transformers, config_name)(**_COMMON | own | options)
    torch.manual_seed(seed)
    return getattr(transformers, model_name)(config).eval()


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy of ``model`` with its weights cast to ``dtype``."""
    return copy.deepcopy(model).to(dtype)
