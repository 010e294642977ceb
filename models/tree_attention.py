"""The attention ``attn_implementation="treewy"`` of transformers: trees by our op, everything else exactly as ``"sdpa"``.

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="treewy")    # or model.set_attn_implementation

A TreeCache then hands the model no mask but the tree itself, packed where a mask would stand: each node's ancestor bits and,
after them, its row's length. Only such a tensor is int64, so prompts and ordinary caches are told from it by the type.

    B batch   H query heads   HK key heads   N nodes   L positions of the cache   D head dim   W words of 64 nodes
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from treewy_inductor import ops_attention

NAME = "treewy"
# What some models add to plain softmax attention, by the name under which they hand it to every implementation.
_ADDITIONS = ("softcap", "sliding_window", "s_aux", "position_bias", "head_mask")


def pack_tree(packed: Tensor, ancestors: Tensor, lengths: Tensor) -> Tensor:
    """Write ``ancestors`` ``[B, N, W]`` and ``lengths`` ``[B]`` into ``packed`` ``[B, 1, N, W + 1]`` int64 and return it."""
    packed[:, 0, :, :-1].copy_(ancestors)
    packed[:, 0, :, -1].copy_(lengths[:, None].expand(-1, packed.shape[2]))
    return packed


def tree_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers' ``sdpa`` does, or over a tree if that is what stands in place of the mask.

    Args:
        query: ``[B, H, N, D]``.
        key: ``[B, HK, L, D]``; value: ``[B, HK, L, E]``.
        attention_mask: ``[B, 1, N, W + 1]`` int64 from :func:`pack_tree`; anything else is a mask.

    Returns:
        ``[B, N, H, E]`` and no weights.

    Raises:
        NotImplementedError: on a tree, for what plain softmax attention does not have.
    """
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    added = [f"{name}={kwargs[name]!r}" for name in _ADDITIONS if kwargs.get(name) is not None]
    if dropout:
        added.append(f"dropout={dropout}")
    if added:
        raise NotImplementedError(
            f'{type(module).__name__} attends with {", ".join(added)}, which attn_implementation="{NAME}" does not have for '
            'trees: load the model with attn_implementation="sdpa" or "eager"'
        )
    ancestors, lengths = attention_mask[:, 0, :, :-1], attention_mask[:, 0, 0, -1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return ops_attention.tree_attention(query, key, value, ancestors, lengths, scale), None


def register_attention() -> None:
    """Make the name known to transformers; repeating it changes nothing."""
    AttentionInterface.register(NAME, tree_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
