"""OLMo Hybrid: Gated DeltaNet with beta up to 2, values twice as wide as keys, and plain softmax attention."""

from __future__ import annotations

from transformers import PreTrainedConfig

from treewy_inductor.layer_shapes import LayerShape, SoftmaxShape
from treewy_inductor.models import qwen3_5

MODEL_TYPES = ("olmo_hybrid",)


def layer_shapes(config: PreTrainedConfig) -> dict[str, LayerShape]:
    """Return the shape of each type of layer; the configuration has no ``head_dim`` unless a checkpoint sets it."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "linear_attention": qwen3_5.linear_shape(config),
        "full_attention": SoftmaxShape(heads=config.num_key_value_heads, key_dim=head_dim, value_dim=head_dim),
    }
