"""Deferred commit (``replay``) in plain PyTorch: accepted tokens wait in a trunk, and the state is written when it is full.

A trunk is a chain between the committed state ``S_0`` and the root of the tree. Its keys ``k_j``, pseudo-values ``u_j`` and
path decays ``g_j`` from ``S_0`` on are known, so that with ``G`` the last of these decays the state above the root is

    S = exp(G) S_0 + sum over the trunk of exp(G - g_j) k_j u_j^T

and the tree's equations hold with it in place of ``S_0``. A kernel never forms ``S``: it lets the trunk enter R and o as
extra ancestors.

    L layers  B batch  T trunk slots  N nodes  P path  HK key heads  HV value heads  K key dim  V value dim
"""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor import reference


def trunk_path(trunk_length: Tensor, slots: int) -> Tensor:
    """Return the trunk as a path over its own slots, ``0 .. trunk_length - 1`` padded with -1: ``[B, slots]`` int32."""
    slot = torch.arange(slots, dtype=torch.int32, device=trunk_length.device)
    return torch.where(slot < trunk_length[:, None], slot, -1)


def tree_gated_delta_trunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    ancestors: Tensor,
    order: Tensor,
    internal: Tensor,
    height: Tensor,
    trunk_keys: Tensor,
    trunk_scale: Tensor,
    trunk_values: Tensor,
    trunk_decay: Tensor,
    trunk_length: Tensor,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Verify a tree that hangs from a trunk: shapes in :mod:`treewy_inductor.ops_replay`, results of ``tree_gated_delta``."""
    above_root = state.clone()[None]
    k, r, u, g = (x[None] for x in (trunk_keys, trunk_scale, trunk_values, trunk_decay))
    reference.commit_state(above_root, k, r, u, g, trunk_path(trunk_length, trunk_keys.shape[1]))
    return reference.tree_gated_delta(
        query,
        key,
        value,
        log_decay,
        beta,
        above_root[0],
        ancestors,
        order,
        internal,
        height,
        scale,
        norm_eps,
        out_dtype,
    )


def commit_trunk(
    state: Tensor,
    trunk_keys: Tensor,
    trunk_scale: Tensor,
    trunk_values: Tensor,
    trunk_decay: Tensor,
    trunk_length: Tensor,
    keys: Tensor,
    key_scale: Tensor,
    pseudo_values: Tensor,
    path_decay: Tensor,
    path: Tensor,
) -> None:
    """Append each row's accepted path to its trunk or, where it does not fit, fold trunk and path into the state, in one write.

    Every row decides for itself, on the device. Shapes in :mod:`treewy_inductor.ops_replay`.
    """
    T = trunk_keys.shape[2]
    count = (path >= 0).sum(1)
    fits = trunk_length + count <= T
    folded = torch.where(fits, 0, trunk_length)
    reference.commit_state(state, trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_path(folded, T))
    reference.commit_state(state, keys, key_scale, pseudo_values, path_decay, path.masked_fill(fits[:, None], -1))
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    # The trunk ends in decay G; an empty one ends where it begins, in 0.
    end = trunk_decay[:, rows[:, 0], (trunk_length - 1).clamp(min=0).long()]  # [L, B, HV(, K)]
    end = torch.where((trunk_length > 0).view(-1, *[1] * (end.dim() - 2)), end, 0)
    step = torch.arange(T, device=path.device)[None] - trunk_length[:, None]  # [B, T], place on the path of what slot receives
    is_new = fits[:, None] & (step >= 0) & (step < count[:, None])
    node = path.gather(1, step.clamp(0, path.shape[1] - 1).long()).clamp(min=0).long()
    for trunk, nodes in (
        (trunk_keys, keys),
        (trunk_scale, key_scale),
        (trunk_values, pseudo_values),
        (trunk_decay, path_decay),
    ):
        received = nodes[:, rows, node]  # [L, B, T, ...]
        if trunk is trunk_decay:
            received = received + end[:, :, None]
        new = is_new.view(1, *is_new.shape, *[1] * (trunk.dim() - 3))
        trunk.copy_(torch.where(new, received.to(trunk.dtype), trunk))
    trunk_length.copy_(torch.where(fits, trunk_length + count, 0))
