"""Which family a configuration belongs to, and so what each of its layers keeps.

A family file has ``MODEL_TYPES``, the ``model_type`` of its text configurations, and ``layer_shapes(config)``, the shape of
each type of layer. Layers of a type that is not in it are refused: a state that the cache does not hold would be lost.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from treewy_inductor.layer_shapes import LayerShape
from treewy_inductor.models import kimi_linear, mamba2, olmo_hybrid, qwen3_5, qwen3_5_moe, qwen3_next

FAMILIES = (qwen3_5, qwen3_5_moe, qwen3_next, olmo_hybrid, kimi_linear, mamba2)


def shapes_of_layers(config: PreTrainedConfig) -> list[LayerShape]:
    """Return the shape of every layer of the model that ``config`` describes, in order.

    Raises:
        NotImplementedError: if the family is not known, or a layer is of a type, or keeps a state, that cannot be branched.
    """
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    family = next((family for family in FAMILIES if config.model_type in family.MODEL_TYPES), None)
    if family is None:
        known = ", ".join(model_type for family in FAMILIES for model_type in family.MODEL_TYPES)
        raise NotImplementedError(
            f"layer 0 is of type {types[0]!r} in a model of type {config.model_type!r}, whose states are not known "
            f"(known: {known}): pass layer_shapes=, one LinearShape or SoftmaxShape a layer, or add a family to models/"
        )
    shape_of = family.layer_shapes(config)
    for index, layer_type in enumerate(types):
        if layer_type not in shape_of:
            raise NotImplementedError(
                f"layer {index} is of type {layer_type!r}, which {config.model_type} does not have "
                f"(it has {', '.join(shape_of)}): its state cannot be branched; use the model's ordinary cache"
            )
        states = getattr(config, "number_of_conv_states", 1)
        if layer_type == "linear_attention" and states != 1:
            raise NotImplementedError(
                f"layer {index} of type {layer_type!r} keeps {states} convolution states, and only one can be branched: "
                "use the model's ordinary cache"
            )
    return [shape_of[layer_type] for layer_type in types]
