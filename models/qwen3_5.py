"""Qwen3.5: three layers of Gated DeltaNet, then one of softmax attention with a gated output."""

from __future__ import annotations

from transformers import PreTrainedConfig

from treewy_inductor.layer_shapes import LayerShape, LinearShape, SoftmaxShape

MODEL_TYPES = ("qwen3_5_text",)


def linear_shape(config: PreTrainedConfig) -> LinearShape:
    """Return the shape of a Gated DeltaNet layer; query, key and value share one convolution."""
    key_channels = config.linear_num_key_heads * config.linear_key_head_dim
    value_channels = config.linear_num_value_heads * config.linear_value_head_dim
    return LinearShape(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_channels=2 * key_channels + value_channels,
        conv_kernel=config.linear_conv_kernel_dim,
    )


def layer_shapes(config: PreTrainedConfig) -> dict[str, LayerShape]:
    """Return the shape of each type of layer."""
    softmax = SoftmaxShape(heads=config.num_key_value_heads, key_dim=config.head_dim, value_dim=config.head_dim)
    return {"linear_attention": linear_shape(config), "full_attention": softmax}
