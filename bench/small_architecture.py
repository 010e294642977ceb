"""The small model's sizes, its first weights, and its checkpoint: a Qwen3.5 text model with a prediction layer.

Three layers of Gated DeltaNet to one of attention, two key heads shared by four value heads, embedding and head tied.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from treewy_inductor.models.multi_token_prediction import MultiTokenPrediction

END_OF_TEXT = "<|endoftext|>"


def small_config(vocab_size: int, end_of_text: int, *, tiny: bool = False) -> Qwen3_5TextConfig:
    """Return the configuration: about 5.7 million parameters with 2048 tokens, or a tiny one to try the script with."""
    hidden, intermediate, layers, head = (64, 96, 4, 16) if tiny else (256, 384, 8, 64)
    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=head,
        linear_value_head_dim=head,
        max_position_embeddings=4096,
        # Sections of the rotated half: a quarter of the head rotates, and text has the same position in all three.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2] if head == 64 else [1, 1, 0],
        },
        architectures=["Qwen3_5ForCausalLM"],
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
        # What transformers reads to find the prediction layer.
        num_mtp_layers=1,
        mtp_layer_types=["full_attention"],
    )


def small_model(config: Qwen3_5TextConfig) -> tuple[PreTrainedModel, MultiTokenPrediction]:
    """Return a freshly initialised model and its prediction layer, fp32."""
    config._attn_implementation = "sdpa"
    model = Qwen3_5ForCausalLM(config)
    prediction = MultiTokenPrediction(model)
    residual_writers = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    for module in (model, prediction):
        for name, parameter in module.named_parameters():
            if name.endswith("conv1d.weight"):
                continue
            if parameter.dim() == 2:
                scale = 1 / math.sqrt(2 * config.num_hidden_layers) if name.endswith(residual_writers) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
            elif name.endswith("A_log"):
                parameter.data.uniform_(1, 16).log_()
            elif name.endswith("dt_bias"):
                # softplus(dt_bias) log-uniform in [1e-3, 1e-1]: heads that remember for tens to thousands of tokens.
                step = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)).exp()
                parameter.data.copy_(step + torch.log(-torch.expm1(-step)))
    return model, prediction


def save_small(
    folder: Path, model: PreTrainedModel, prediction: MultiTokenPrediction, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Write one checkpoint in bf16: the model, the prediction layer under ``mtp.``, the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = model.config.dtype
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    model.config.dtype = dtype
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    weights |= {f"mtp.{name}": tensor for name, tensor in prediction.state_dict().items()}
    stored = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in weights.items()}
    unfinished = folder / "unfinished.safetensors"
    save_file(stored, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)
    unfinished.replace(folder / "model.safetensors")
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def restore_small(folder: Path, model: Any, prediction: MultiTokenPrediction) -> None:
    """Put the weights of :func:`save_small` back, rounded to bf16 as they were stored."""
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({n: w for n, w in weights.items() if not n.startswith("mtp.")}, strict=False)
    prediction.load_state_dict({n.removeprefix("mtp."): w for n, w in weights.items() if n.startswith("mtp.")})
