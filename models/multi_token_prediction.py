"""The multi-token-prediction layer of a checkpoint: from a hidden state and the token after it to the token after that.

    x_i  = fc [ norm_e(embedding(t_{i+1})) ; norm_h(h_i) ]          h_i: what lm_head reads at position i
    m_i  = norm(decoder_layer(x))_i                                 lm_head(m_i): logits of t_{i+2}

Applied again with ``m_i`` in place of ``h_i`` and the drafted token in place of ``t_{i+1}``, it drafts one token further.
Parameter names are those of the checkpoint without its prefix ``mtp.``: ``fc``, ``pre_fc_norm_embedding``,
``pre_fc_norm_hidden``, ``layers.0.*``, ``norm``. Embedding, head and rotary embedding are the model's own.

Letters: B batch  T tokens of this call  S keys the layer sees  D hidden size.
"""

from __future__ import annotations

import inspect
import weakref
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

_PREFIX = "mtp."
_layers: weakref.WeakKeyDictionary[Any, MultiTokenPrediction] = weakref.WeakKeyDictionary()


class KeysValues(Protocol):
    """What the layer's attention stores its keys and values in."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in keys and values ``[B, heads, T, dim]``; return those to attend over, ``[B, heads, S, dim]``."""


class _Probe:
    """Attends over this call's keys and values alone, and shows them."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.given = keys, values
        return keys, values


class MultiTokenPrediction(nn.Module):
    """One multi-token-prediction layer of ``model``, with fresh weights; :meth:`of` loads a checkpoint's.

    Args:
        model: a causal language model of transformers with at least one ``full_attention`` layer, whose class,
            sizes and attention implementation this layer shares.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = model.config.get_text_config()
        full_attention = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
        if not full_attention:
            raise ValueError(
                f"layer_types of {type(model).__name__} are {sorted(set(config.layer_types))}: a prediction layer is a "
                "full_attention layer, so the model needs one to take the class from"
            )
        decoder = model.get_decoder()
        like = decoder.layers[full_attention[-1]]
        norm_class, eps = type(like.input_layernorm), config.rms_norm_eps
        self.pre_fc_norm_embedding = norm_class(config.hidden_size, eps=eps)
        self.pre_fc_norm_hidden = norm_class(config.hidden_size, eps=eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([type(like)(config, full_attention[-1])])
        self.norm = norm_class(config.hidden_size, eps=eps)
        weight = model.get_input_embeddings().weight
        self.to(device=weight.device, dtype=weight.dtype)
        # In a tuple, so that the model's own modules are not among this module's parameters.
        self._of_model = (model.get_input_embeddings(), model.get_output_embeddings(), decoder.rotary_emb)
        self._is_eager = config._attn_implementation == "eager"
        parameters = inspect.signature(like.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @classmethod
    def of(cls, model: Any) -> MultiTokenPrediction:
        """Return the layer of the checkpoint that ``model`` was loaded from, in the model's dtype and on its device.

        It is loaded once for each model, so that what was compiled and captured for it is found again.

        Raises:
            ValueError: if the model was not loaded from a checkpoint, or that holds no such layer.
        """
        known = _layers.get(model)
        weight = model.get_input_embeddings().weight
        if known is not None and known.embedding.weight is weight and known.fc.weight.device == weight.device:
            return known
        weights = _checkpoint_weights(model)
        layer = cls(model)
        expected, found = set(layer.state_dict()), set(weights)
        if expected != found:
            raise ValueError(
                f"the checkpoint {model.config.name_or_path!r} holds other weights under {_PREFIX!r} than one prediction layer "
                f"needs: missing {sorted(expected - found)}, not understood {sorted(found - expected)}"
            )
        layer.load_state_dict(weights)
        _layers[model] = layer.eval()
        return layer

    def forward(
        self, tokens: Tensor, hidden_states: Tensor, positions: Tensor, mask: Tensor, keys_values: KeysValues
    ) -> Tensor:
        """Return ``m [B, T, D]``: what :meth:`logits` reads and what the next depth takes as ``hidden_states``.

        Args:
            tokens: ``[B, T]`` int64, t_{i+1}.
            hidden_states: ``[B, T, D]``, h_i, or m_i of the depth before.
            positions: ``[B, T]`` int64, of ``tokens`` in the text.
            mask: ``[B, 1, T, S]`` bool, true where a key is seen, the token's own among them.
            keys_values: stores this call's keys and values and returns all S.
        """
        embedding, _, rotary = self._of_model
        if self._is_eager:
            # Eager attention adds its mask to the scores.
            mask = torch.where(mask, 0.0, torch.finfo(hidden_states.dtype).min).to(hidden_states.dtype)
        # Some rotary embeddings take the place in time, height and width, which for text is the same.
        places = positions.expand(3, *positions.shape) if hasattr(rotary, "mrope_section") else positions
        joined = torch.cat([self.pre_fc_norm_embedding(embedding(tokens)), self.pre_fc_norm_hidden(hidden_states)], dim=-1)
        projected = self.fc(joined)
        output = self.layers[0](
            projected,
            position_embeddings=rotary(projected, places),
            attention_mask=mask,
            **{self._cache_argument: keys_values},
        )
        return self.norm(output)

    @property
    def embedding(self) -> nn.Module:
        """The model's own embedding of tokens."""
        return self._of_model[0]

    @torch.no_grad()
    def empty_keys_values(self, rows: int, places: int) -> tuple[Tensor, Tensor]:
        """Return zeroed buffers ``[rows, heads, places, dim]`` for the keys and values of this layer's attention."""
        weight = self.fc.weight
        token = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
        probe = _Probe()
        self(token, weight.new_zeros(1, 1, weight.shape[0]), token, torch.ones_like(token, dtype=torch.bool)[None], probe)
        keys, values = (new.new_zeros(rows, new.shape[1], places, new.shape[3]) for new in probe.given)
        return keys, values

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Return the model's head on ``m``: ``[..., D]`` to ``[..., vocab]``."""
        return self._of_model[1](hidden_states)


def _checkpoint_weights(model: Any) -> dict[str, Tensor]:
    from safetensors import safe_open

    folder = _checkpoint_folder(model.config)
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    weights = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, the opened file is no dict
                if name.startswith(_PREFIX):
                    weights[name.removeprefix(_PREFIX)] = opened.get_tensor(name)
    if not weights:
        raise ValueError(
            f"no weights under {_PREFIX!r} in the safetensors files of {model.config.name_or_path!r}: load the model from a "
            "checkpoint that has a multi-token-prediction layer, or take another drafter"
        )
    return weights


def _checkpoint_folder(config: Any) -> Path | None:
    """Return the folder of the checkpoint, given itself or as a name on the hub whose files a load has left on this machine."""
    name = config.name_or_path
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    for file in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME):
        found = cached_file(
            name,
            file,
            revision=getattr(config, "_commit_hash", None),
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        if found is not None:
            return Path(found).parent
    return None
