"""Kimi Linear: Kimi Delta Attention, whose key channels decay each on their own, and softmax layers that keep MLA's latents."""

from __future__ import annotations

from transformers import PreTrainedConfig

from treewy_inductor.layer_shapes import LayerShape, LinearShape, SoftmaxShape

MODEL_TYPES = ("kimi_linear",)


def layer_shapes(config: PreTrainedConfig) -> dict[str, LayerShape]:
    """Return the shape of each type of layer; a softmax layer keeps one latent and one rotated key for all its heads."""
    linear = LinearShape(
        key_heads=config.linear_num_heads,
        value_heads=config.linear_num_heads,
        key_dim=config.linear_head_dim,
        value_dim=config.linear_head_dim,
        conv_channels=3 * config.linear_num_heads * config.linear_head_dim,
        conv_kernel=config.linear_conv_kernel_dim,
        decay_per_channel=True,
    )
    latent = SoftmaxShape(heads=1, key_dim=config.kv_lora_rank, value_dim=config.qk_rope_head_dim)
    return {"linear_attention": linear, "full_attention": latent}
