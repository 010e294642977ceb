"""The op and the marker of ``mamba_state_commit="fused"``: schema and fake kernel; the reference is their eager meaning.

    B batch  N nodes  HK key heads  HV value heads  K key dim  V value dim

tree_gated_delta_fused   the arguments and results of tree_gated_delta_trunk (:mod:`treewy_inductor.ops_replay`), but state is
                         overwritten by the state above the root: the trunk is folded into it. The trunk is only read, so
                         whoever calls sets its length to 0 before the next call.

state_out_fused          marker: the arguments of state_out with the state [B,HV,K,V] after the buffers; returns their new
                         contents, the state's last. state_in_trunk stands at the other end of the recurrence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor import ops, reference_fused
from treewy_inductor.ops_replay import check_trunk

torch.library.define(
    "treewy::tree_gated_delta_fused",
    "(Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor beta, Tensor(a!) state, "
    "Tensor ancestors, Tensor order, Tensor internal, Tensor height, Tensor trunk_keys, Tensor trunk_scale, "
    "Tensor trunk_values, Tensor trunk_decay, Tensor trunk_length, float scale, float norm_eps, ScalarType out_dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "treewy::state_out_fused",
    "(Tensor final_state, Tensor pseudo_values, Tensor keys, Tensor path_decay, Tensor key_scale, Tensor state, int layer, "
    "int slot) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.impl("treewy::tree_gated_delta_fused", "CompositeExplicitAutograd", reference_fused.tree_gated_delta_fused)
torch.library.impl("treewy::state_out_fused", "CompositeExplicitAutograd", lambda *_: ops.marker_ran("state_out_fused"))

tree_gated_delta_fused = torch.ops.treewy.tree_gated_delta_fused.default
state_out_fused = torch.ops.treewy.state_out_fused.default


@torch.library.register_fake("treewy::tree_gated_delta_fused")
def _tree_gated_delta_fused_fake(
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
    trunk = (trunk_keys, trunk_scale, trunk_values, trunk_decay)
    check_trunk("tree_gated_delta_fused", trunk, key, value, log_decay)
    return ops.tree_gated_delta(
        query, key, value, log_decay, beta, state, ancestors, order, internal, height, scale, norm_eps, out_dtype
    )


@torch.library.register_fake("treewy::state_out_fused")
def _state_out_fused_fake(
    final_state: Tensor,
    pseudo_values: Tensor,
    keys: Tensor,
    path_decay: Tensor,
    key_scale: Tensor,
    state: Tensor,
    layer: int,
    slot: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(pseudo_values),
        torch.empty_like(keys),
        torch.empty_like(path_decay),
        torch.empty_like(key_scale),
        torch.empty_like(state),
    )
