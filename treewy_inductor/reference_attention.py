"""The op of softmax attention over a draft tree, in plain PyTorch.

B batch   N nodes   H query heads   HK key heads   L positions   D key dim   E value dim   W words of 64 nodes
"""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor.reference import unpack_ancestors


def tree_attention(query: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Let each node attend its row's committed positions, its ancestors and itself; an inert node's output is zero.

    Shapes are those of :mod:`treewy_inductor.ops_attention`. Computes in float32, in float64 if the query is float64.

    What stands beyond a row's tree is never read, so it may be NaN. A node's key and value reach its descendants and nobody
    else, whatever they hold: scores are selected before the softmax, and a node's value that is not finite counts as zero,
    since zero times it is NaN.
    """
    N, L, groups = query.shape[2], keys.shape[2], query.shape[1] // keys.shape[1]
    work = torch.promote_types(query.dtype, torch.float32)
    A = unpack_ancestors(ancestors)  # [B, N, N]
    column = torch.arange(L, device=keys.device) - lengths[:, None]  # [B, L], node of a position, negative before the tree
    is_committed, is_draft = column < 0, (column >= 0) & (column < N)
    above = A.gather(2, column.clamp(0, N - 1)[:, None].expand(-1, N, -1))  # [B, N, L]
    seen = is_committed[:, None] | (is_draft[:, None] & above)
    is_node = A.diagonal(dim1=-2, dim2=-1)  # [B, N]

    v = values.to(work)
    v = torch.where(is_committed[:, None, :, None] | (is_draft[:, None, :, None] & v.isfinite()), v, 0)
    q = query.to(work).unflatten(1, (-1, groups)).flatten(2, 3)  # [B, HK, groups * N, D]
    scores = (q @ keys.to(work).mT * scale).unflatten(2, (groups, N))  # [B, HK, groups, N, L]
    weights = torch.where(seen[:, None, None], scores, -torch.inf).softmax(-1)
    output = (weights.flatten(2, 3) @ v).unflatten(2, (groups, N)).flatten(1, 2).transpose(1, 2)  # [B, N, H, E]
    return torch.where(is_node[..., None, None], output, 0).to(query.dtype).contiguous()
