"""Which family a configuration belongs to, and so what each of its layers keeps.

A family file has ``MODEL_TYPES``, the ``model_type`` of its text configurations, and ``layer_shapes(config)``, the shape of
each type of layer. Layers of a type that is not in it are refused: a state that the cache does not hold would be lost.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from treewy_inductor.layer_shapes import LayerShape
from treewy_inductor.models import kimi_linear, mamba2, olmo_hybrid, qwen3_5, qwen3_5_moe, qwen3_next

FAMILIES = (qwen3_5, qwen3_5_moe, qwen3_next, olmo_hybrid, kimi_linear, mamba2)

# What layers of each type keep between two tokens, as transformers names the types, newer names and older ones.
KEPT = {
    "full_attention": "a key and a value for each token",
    "sliding_attention": "keys and values in a window that rolls as tokens come",
    "chunked_attention": "keys and values of a chunk that ends as tokens come",
    "reference_sliding_attention": "keys and values in a ring that overwrites itself",
    "indexed_attention": "the keys of an indexer that picks which tokens are attended to",
    "minimax_m3_sparse": "the keys of an indexer that picks which blocks are attended to",
    "compressed_sparse_attention": "blocks of tokens compressed as they fill up, and an indexer's keys",
    "heavily_compressed_attention": "blocks of tokens compressed as they fill up",
    "conv": "the last inputs of a convolution and nothing of a recurrence",
    "linear_attention": "a recurrent state of a form that is not known",
    "hybrid": "a recurrent or convolution state and softmax keys at once",
    "hybrid_sliding": "a recurrent or convolution state and a rolling window of keys at once",
}
KEPT |= {"mamba": KEPT["linear_attention"], "recurrent": KEPT["linear_attention"]}
KEPT |= {"deepseek_sparse_attention": KEPT["indexed_attention"]}
# Older configurations list their layers under other names.
LISTS_OF_TYPES = ("layer_types", "layers_block_type", "block_types")


def shapes_of_layers(config: PreTrainedConfig) -> list[LayerShape]:
    """Return the shape of every layer of the model that ``config`` describes, in order.

    Raises:
        NotImplementedError: if the family is not known, or a layer is of a type, or keeps a state, that cannot be branched.
    """
    types = _types_of(config)
    family = next((family for family in FAMILIES if config.model_type in family.MODEL_TYPES), None)
    if family is None:
        raise NotImplementedError(_unknown(config, types))
    shape_of = family.layer_shapes(config)
    for index, layer_type in enumerate(types):
        if layer_type not in shape_of:
            raise NotImplementedError(
                f"layer {index} is of type {layer_type!r}, which {config.model_type} does not have (it has "
                f"{', '.join(shape_of)}) and which keeps {KEPT.get(layer_type, 'what is not known')}: "
                "that cannot be branched; use the model's ordinary cache"
            )
        states = getattr(config, "number_of_conv_states", 1)
        if layer_type == "linear_attention" and states != 1:
            raise NotImplementedError(
                f"layer {index} of type {layer_type!r} keeps {states} convolution states, and only one can be branched: "
                "use the model's ordinary cache"
            )
    return [shape_of[layer_type] for layer_type in types]


def _types_of(config: PreTrainedConfig) -> list[str]:
    listed = next(filter(None, (getattr(config, name, None) for name in LISTS_OF_TYPES)), None)
    return list(listed) if listed else ["full_attention"] * (getattr(config, "num_hidden_layers", None) or 1)


def _unknown(config: PreTrainedConfig, types: list[str]) -> str:
    """Say which layer of a model of no known family is the first that needs more than keys and values, and what it keeps."""
    known = ", ".join(model_type for family in FAMILIES for model_type in family.MODEL_TYPES)
    index = next((index for index, layer_type in enumerate(types) if layer_type != "full_attention"), 0)
    is_listed = any(getattr(config, name, None) for name in LISTS_OF_TYPES)
    # A model without a list may be one of softmax layers, or one whose only type of layer is recurrent.
    kept = KEPT.get(types[index], "what is not known") if is_listed else "what its configuration does not say"
    kind = f"of type {types[index]!r} " if is_listed else ""
    return (
        f"layer {index} {kind}in a model of type {config.model_type!r} keeps {kept}, and a cache for trees is not known for "
        f"this model (known: {known}): use its ordinary cache; or, if all that its layers keep is softmax keys and values and "
        "gated delta or Mamba2 states behind one short convolution, pass layer_shapes=, one LinearShape or SoftmaxShape a "
        "layer, or add a family to models/ (docs/families.md)"
    )
