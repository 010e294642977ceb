"""The op of softmax attention over a draft tree: schema and fake kernel; the reference is its eager meaning.

B batch   N nodes   H query heads   HK key heads   L positions   D key dim   E value dim   W words of 64 nodes

tree_attention   query [B,H,N,D]; keys [B,HK,L,D]; values [B,HK,L,E]; ancestors [B,N,W] int64; lengths [B] int64.
                 Row b's committed tokens stand at positions below lengths[b] and node i's key and value at
                 lengths[b] + i; query head h reads key head h // (H / HK). Returns [B,N,H,E] like query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor import reference_attention

torch.library.define(
    "treewy::tree_attention",
    "(Tensor query, Tensor keys, Tensor values, Tensor ancestors, Tensor lengths, float scale) -> Tensor",
)
torch.library.impl("treewy::tree_attention", "CompositeExplicitAutograd", reference_attention.tree_attention)
tree_attention = torch.ops.treewy.tree_attention.default


@torch.library.register_fake("treewy::tree_attention")
def _tree_attention_fake(
    query: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    B, H, N, D = query.shape
    HK, L, E = values.shape[1:]
    torch._check(H % HK == 0, lambda: f"tree_attention: {H} query heads are not a multiple of {HK} key heads")
    for name, tensor, expected in (
        ("keys", keys, (B, HK, L, D)),
        ("values", values, (B, HK, L, E)),
        ("ancestors", ancestors, (B, N, -(-N // 64))),
        ("lengths", lengths, (B,)),
    ):
        torch._check(
            tuple(tensor.shape) == expected,
            lambda name=name, tensor=tensor, expected=expected: (
                f"tree_attention: {name} is {list(tensor.shape)}, expected {list(expected)}"
            ),
        )
    torch._check(
        query.dtype == keys.dtype == values.dtype,
        lambda: f"tree_attention: query, keys and values are {query.dtype}, {keys.dtype}, {values.dtype}: expected one dtype",
    )
    return query.new_empty((B, N, H, E))
