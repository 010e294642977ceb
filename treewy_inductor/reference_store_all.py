"""Verification with one full state a node (``store_all``) in plain PyTorch: the baseline that serving engines use.

The N state blocks of a row serve two ends: one of them, ``accepted``, holds the committed state, and a verification
overwrites all of them with the nodes' states. Committing is then only a new value of ``accepted``.

    B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim
"""

from __future__ import annotations

import torch
from torch import Tensor


def committed_state(snapshots: Tensor, accepted: Tensor) -> Tensor:
    """Return each row's committed state, block ``accepted`` of its row; NaN where ``accepted`` is -1, the state being lost.

    Args:
        snapshots: ``[B, N, HV, K, V]``.
        accepted: ``[B]`` int32.

    Returns:
        ``[B, HV, K, V]``, a copy.
    """
    rows = torch.arange(accepted.shape[0], device=accepted.device)
    lost = (accepted < 0)[:, None, None, None]
    return torch.where(lost, torch.nan, snapshots[rows, accepted.clamp(min=0).long()])


def tree_gated_delta_snapshots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    parents: Tensor,
    accepted: Tensor,
    snapshots: Tensor,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """Leave every node's state in its block, in tree order: ``S_t = a_t (I - b_t k_t k_t^T) S_p(t) + b_t k_t v_t^T``.

    Args:
        parents: ``[B, N]`` int32, -1 at a root, -2 at an inert node, whose block and whose zero output stay.
        accepted: ``[B]`` int32, the block of the committed state, read before anything is written.
        snapshots: ``[B, N, HV, K, V]``, overwritten. The others as in :mod:`treewy_inductor.ops`.

    Returns:
        Outputs ``[B, N, HV, V]`` of ``out_dtype``.
    """
    B, N, HV, K, V = snapshots.shape
    work = torch.promote_types(snapshots.dtype, torch.float32)
    groups = HV // key.shape[2]
    rows = torch.arange(B, device=parents.device)
    is_node = parents != -2
    q, k, v, log_a, b = (
        torch.where(is_node.view(B, N, *[1] * (x.dim() - 2)), x.to(work), 0) for x in (query, key, value, log_decay, beta)
    )
    if norm_eps >= 0:
        q, k = (x * (x.square().sum(-1, keepdim=True) + norm_eps).rsqrt() for x in (q, k))
    q, k = (q * scale).repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
    a = log_a.exp() if log_a.dim() == 4 else log_a.exp()[..., None].expand(B, N, HV, K)
    S_0 = committed_state(snapshots, accepted).to(work)
    output = torch.zeros(B, N, HV, V, dtype=work, device=value.device)
    for t in range(N):
        p = parents[:, t].long()
        above = torch.where((p < 0)[:, None, None, None], S_0, snapshots[rows, p.clamp(min=0)].to(work))
        decayed = a[:, t, :, :, None] * above
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", decayed, k[:, t])
        S = decayed + b[:, t, :, None, None] * k[:, t, :, :, None] * error[:, :, None]
        here = is_node[:, t]
        snapshots[:, t] = torch.where(here[:, None, None, None], S.to(snapshots.dtype), snapshots[:, t])
        output[:, t] = torch.where(here[:, None, None], torch.einsum("bhkv,bhk->bhv", S, q[:, t]), 0)
    return output.to(out_dtype)


def accepted_block(accepted: Tensor, parents: Tensor, path: Tensor) -> Tensor:
    """Return the block that holds the committed state once ``path`` is accepted.

    It is the path's last node. A row whose path is empty keeps its block if its tree was inert; otherwise the verification has
    overwritten the committed state, and -1 says that it is lost.

    Args:
        accepted: ``[B]`` int32, the block so far.
        parents: ``[B, N]`` int32 of the tree that was verified.
        path: ``[B, P]`` int32, root first, padded with -1.

    Returns:
        ``[B]`` int32.
    """
    count = (path >= 0).sum(1)
    last = path.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    kept = torch.where((parents == -2).all(1), accepted, -1)
    return torch.where(count > 0, last, kept).to(accepted.dtype)
