"""The op of linear attention that decays but does not correct, in plain PyTorch: Mamba2's recurrence over a tree.

    S_t = a_t S_p(t) + b_t k_t v_t^T        o_t = S_t^T q_t

It is the gated delta rule without the prediction, so pseudo-values are ``u_t = b_t v_t`` and nothing has to be solved.

    B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim   W words of 64 nodes
"""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor.reference import unpack_ancestors


def tree_linear_attention(
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
    """Read every node's output over a draft tree; shapes are those of :mod:`treewy_inductor.ops_linear`.

    Computes in float32, in float64 if the state is float64. Products with nodes that are no ancestors are left out of the
    sums node by node, so that a rejected node's NaN stays its own.
    """
    work = torch.promote_types(state.dtype, torch.float32)
    groups = value.shape[2] // key.shape[2]
    A = unpack_ancestors(ancestors)[:, None]  # [B, 1, N, N]
    node = A.diagonal(dim1=-2, dim2=-1)[..., None]  # [B, 1, N, 1]
    q, k, v, log_a, b = (
        torch.where(node if x.dim() == 4 else node[..., 0], x.transpose(1, 2).to(work), 0)
        for x in (query, key, value, log_decay, beta)
    )
    q, k = (x.repeat_interleave(groups, 1) for x in (q * scale, k))
    u = b[..., None] * v
    g = torch.where(A, log_a[..., None, :], 0).sum(-1)  # [B, HV, N]
    D = (g[..., :, None] - g[..., None, :]).masked_fill(~A, -torch.inf).exp()
    QK = torch.where(A, D * (q @ k.mT), 0)
    o = g.exp()[..., None] * (q @ state.to(work))
    for i in range(key.shape[1]):
        o += torch.where(A[..., i, None], QK[..., i, None] * u[:, :, i, None], 0)
    return (
        o.transpose(1, 2).to(out_dtype).contiguous(),
        u.transpose(1, 2).contiguous(),
        g.transpose(1, 2).contiguous(),
        node[..., 0].to(work).expand(-1, key.shape[2], -1).transpose(1, 2).contiguous(),
    )
