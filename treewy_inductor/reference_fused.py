"""A commit fused with the next verification (``fused``) in plain PyTorch: what was accepted is folded where the state is read.

A commit leaves the accepted path in a trunk, as :mod:`treewy_inductor.reference_replay` describes one, and the next
verification writes ``S = exp(G) S_0 + sum over the trunk of exp(G - g_j) k_j u_j^T`` over ``S_0`` and verifies against ``S``. A
state is so read once and written once a step, in one kernel. Whoever verifies empties the trunk afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor import reference
from treewy_inductor.reference_replay import trunk_path


def tree_gated_delta_fused(
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
    """Fold the trunk into ``state``, then verify against it; shapes in :mod:`treewy_inductor.ops_fused`.

    What is verified against is the state as it was written, rounded if its dtype is a narrow one: the results are those of a
    commit and a verification one after the other.
    """
    k, r, u, g = (x[None] for x in (trunk_keys, trunk_scale, trunk_values, trunk_decay))
    reference.commit_state(state[None], k, r, u, g, trunk_path(trunk_length, trunk_keys.shape[1]))
    return reference.tree_gated_delta(
        query,
        key,
        value,
        log_decay,
        beta,
        state,
        ancestors,
        order,
        internal,
        height,
        scale,
        norm_eps,
        out_dtype,
    )
