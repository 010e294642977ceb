"""Mamba2, and the hybrids that use its layer, Bamba and Granite 4: a decay for each head, and no correction."""

from __future__ import annotations

from transformers import PreTrainedConfig

from treewy_inductor.layer_shapes import LayerShape, LinearShape, SoftmaxShape

MODEL_TYPES = ("mamba2", "bamba", "granitemoehybrid")


def layer_shapes(config: PreTrainedConfig) -> dict[str, LayerShape]:
    """Return the shape of each type of layer; B and C are the keys and queries, x times dt the values."""
    if config.model_type == "mamba2":
        sizes = config.num_heads, config.head_dim, config.n_groups, config.state_size, config.conv_kernel
        return {"linear_attention": _mamba2_shape(*sizes)}
    sizes = config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state, config.mamba_d_conv
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    softmax = SoftmaxShape(heads=config.num_key_value_heads, key_dim=head_dim, value_dim=head_dim)
    return {"linear_attention": _mamba2_shape(*sizes), "full_attention": softmax}


def _mamba2_shape(heads: int, head_dim: int, groups: int, state_size: int, kernel: int) -> LinearShape:
    return LinearShape(
        key_heads=groups,
        value_heads=heads,
        key_dim=state_size,
        value_dim=head_dim,
        conv_channels=heads * head_dim + 2 * groups * state_size,
        conv_kernel=kernel,
        state_is_value_major=True,
    )
