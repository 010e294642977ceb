"""Models with a state that cannot be branched are refused when the cache is constructed, and the layer is named.

Convolutions without a recurrence, sparse indexers and what they keep of every token, rolling windows, layers of two states,
other recurrences: each would be lost with a rejected node, so none may be taken for softmax or for a known recurrence.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import transformers

from treewy_inductor.models.families import KEPT
from treewy_inductor.models.tree_cache import TreeCache

THREE = ["full_attention", "full_attention"]
# Configuration, its options, the layer that must be named, and its type, of which older versions have other names.
MODELS: tuple[tuple[str, dict[str, Any], int, str], ...] = (
    ("Lfm2Config", {"num_hidden_layers": 3, "layer_types": [*THREE, "conv"]}, 2, "conv"),
    ("Lfm2MoeConfig", {"num_hidden_layers": 3, "layer_types": [*THREE, "conv"], "num_dense_layers": 1}, 2, "conv"),
    ("DeepseekV32Config", {"num_hidden_layers": 2}, 0, "indexed_attention"),
    ("GlmMoeDsaConfig", {"num_hidden_layers": 2}, 0, "indexed_attention"),
    ("DeepseekV4Config", {}, 0, "heavily_compressed_attention"),
    ("Qwen4ExpTextConfig", {}, 0, "linear_attention"),
    ("FalconH1Config", {"num_hidden_layers": 2}, 0, "hybrid"),
    ("ZayaConfig", {}, 0, "hybrid"),
    ("Zamba2Config", {}, 0, "linear_attention"),
    ("JambaConfig", {}, 0, "linear_attention"),
    ("NemotronHConfig", {}, 0, "linear_attention"),
    ("MiniMaxConfig", {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}, 1, "linear_attention"),
    ("MambaConfig", {"num_hidden_layers": 2}, 0, "linear_attention"),
    ("FalconMambaConfig", {"num_hidden_layers": 2}, 0, "linear_attention"),
    ("RecurrentGemmaConfig", {"num_hidden_layers": 3}, 0, "linear_attention"),
    ("Gemma3TextConfig", {"num_hidden_layers": 2}, 0, "sliding_attention"),
)
WITHOUT_A_LIST = ("RwkvConfig", "xLSTMConfig")


def _config(name: str, options: dict[str, Any]) -> Any:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)(**options)


@pytest.mark.parametrize(("name", "options", "layer", "layer_type"), MODELS, ids=[model[0] for model in MODELS])
def test_layer_and_what_it_keeps_are_named(name: str, options: dict[str, Any], layer: int, layer_type: str) -> None:
    config = _config(name, options)
    with pytest.raises(NotImplementedError) as raised:
        TreeCache(config, 1, 64, 4)
    told = re.match(r"layer (\d+) of type '(\w+)' in a model of type '(\w+)' keeps (.+), and a cache", str(raised.value))
    assert told is not None, raised.value
    assert (int(told[1]), told[3]) == (layer, config.model_type)
    assert told[4] == KEPT[told[2]] == KEPT[layer_type]


@pytest.mark.parametrize("name", WITHOUT_A_LIST)
def test_a_configuration_without_types_of_layers_is_not_taken_for_softmax(name: str) -> None:
    config = _config(name, {})
    with pytest.raises(NotImplementedError, match=f"^layer 0 in a model of type '{config.model_type}' keeps what its conf"):
        TreeCache(config, 1, 64, 4)


def test_a_known_family_with_a_state_more_is_refused_at_that_layer() -> None:
    config = transformers.Qwen3_5TextConfig(num_hidden_layers=4)
    config.layer_types = ["linear_attention", "full_attention", "linear_attention", "indexed_attention"]
    with pytest.raises(NotImplementedError, match=r"^layer 3 is of type 'indexed_attention', which .* keys of an indexer"):
        TreeCache(config, 1, 64, 4)
