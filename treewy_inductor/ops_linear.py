"""The op of linear attention with a decay and no correction: schema and fake kernel; the reference is its eager meaning.

    B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim   W words of 64 nodes

    tree_linear_attention   query, key [B,N,HK,K]; value [B,N,HV,V]; log_decay, beta [B,N,HV]; state [B,HV,K,V]; ancestors
                            [B,N,W] int64. Returns output [B,N,HV,V] of out_dtype, and in float32 (float64 for a float64 state)
                            pseudo-values [B,N,HV,V], path decays [B,N,HV], key scales [B,N,HK], which are 1.

What it returns fills the buffers of tree_gated_delta, so a commit is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor import reference_linear

torch.library.define(
    "treewy::tree_linear_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor beta, Tensor state, Tensor ancestors, float scale, "
    "ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.impl("treewy::tree_linear_attention", "CompositeExplicitAutograd", reference_linear.tree_linear_attention)
tree_linear_attention = torch.ops.treewy.tree_linear_attention.default


@torch.library.register_fake("treewy::tree_linear_attention")
def _tree_linear_attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    ancestors: Tensor,
    scale: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, N, HK, K = key.shape
    HV, V = value.shape[2:]
    torch._check(HV % HK == 0, lambda: f"tree_linear_attention: {HV} value heads are not a multiple of {HK} key heads")
    for name, tensor, expected in (
        ("query", query, (B, N, HK, K)),
        ("value", value, (B, N, HV, V)),
        ("log_decay", log_decay, (B, N, HV)),
        ("beta", beta, (B, N, HV)),
        ("state", state, (B, HV, K, V)),
        ("ancestors", ancestors, (B, N, -(-N // 64))),
    ):
        torch._check(
            tuple(tensor.shape) == expected,
            lambda name=name, tensor=tensor, expected=expected: (
                f"tree_linear_attention: {name} is {list(tensor.shape)}, expected {list(expected)}"
            ),
        )
    work = torch.promote_types(state.dtype, torch.float32)
    return (
        value.new_empty((B, N, HV, V), dtype=out_dtype),
        value.new_empty((B, N, HV, V), dtype=work),
        value.new_empty((B, N, HV), dtype=work),
        value.new_empty((B, N, HK), dtype=work),
    )
