"""The op and the markers of ``mamba_state_commit="store_all"``: schema and fake kernel; the reference is their eager meaning.

B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim

tree_gated_delta_snapshots   query, key [B,N,HK,K]; value [B,N,HV,V]; log_decay [B,N,HV] or [B,N,HV,K]; beta [B,N,HV]; parents
                             [B,N], accepted [B] int32; snapshots [B,N,HV,K,V] overwritten with every node's state. Returns
                             output [B,N,HV,V] of out_dtype. norm_eps and scale as in tree_gated_delta.

state_in_snapshots           snapshots, accepted, parents: returns the committed state [B,HV,K,V].
state_out_snapshots          final_state [B,HV,K,V], snapshots and HK: returns the new contents of snapshots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor import reference_store_all
from treewy_inductor.ops import marker_ran

torch.library.define(
    "treewy::tree_gated_delta_snapshots",
    "(Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor beta, Tensor parents, Tensor accepted, "
    "Tensor(a!) snapshots, float scale, float norm_eps, ScalarType out_dtype) -> Tensor",
)
torch.library.define(
    "treewy::state_in_snapshots", "(Tensor snapshots, Tensor accepted, Tensor parents, int layer, int slot) -> Tensor"
)
torch.library.define(
    "treewy::state_out_snapshots", "(Tensor final_state, Tensor snapshots, int key_heads, int layer, int slot) -> Tensor"
)
torch.library.impl(
    "treewy::tree_gated_delta_snapshots",
    "CompositeExplicitAutograd",
    reference_store_all.tree_gated_delta_snapshots,
)
for _name in ("state_in_snapshots", "state_out_snapshots"):
    torch.library.impl(f"treewy::{_name}", "CompositeExplicitAutograd", lambda *_, name=_name: marker_ran(name))

tree_gated_delta_snapshots = torch.ops.treewy.tree_gated_delta_snapshots.default
state_in_snapshots = torch.ops.treewy.state_in_snapshots.default
state_out_snapshots = torch.ops.treewy.state_out_snapshots.default


@torch.library.register_fake("treewy::tree_gated_delta_snapshots")
def _tree_gated_delta_snapshots_fake(
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
    B, N, HK, K = key.shape
    HV, V = value.shape[2:]

    def check(name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
        torch._check(
            tuple(tensor.shape) in shapes,
            lambda: (
                f"tree_gated_delta_snapshots: {name} is {list(tensor.shape)}, expected "
                f"{' or '.join(map(str, map(list, shapes)))}"
            ),
        )

    torch._check(HV % HK == 0, lambda: f"tree_gated_delta_snapshots: {HV} value heads are not a multiple of {HK} key heads")
    check("query", query, (B, N, HK, K))
    check("value", value, (B, N, HV, V))
    check("log_decay", log_decay, (B, N, HV), (B, N, HV, K))
    check("beta", beta, (B, N, HV))
    check("parents", parents, (B, N))
    check("accepted", accepted, (B,))
    check("snapshots", snapshots, (B, N, HV, K, V))
    return value.new_empty((B, N, HV, V), dtype=out_dtype)


@torch.library.register_fake("treewy::state_in_snapshots")
def _state_in_snapshots_fake(snapshots: Tensor, accepted: Tensor, parents: Tensor, layer: int, slot: int) -> Tensor:
    B, _, HV, K, V = snapshots.shape
    return snapshots.new_empty((B, HV, K, V))


@torch.library.register_fake("treewy::state_out_snapshots")
def _state_out_snapshots_fake(final_state: Tensor, snapshots: Tensor, key_heads: int, layer: int, slot: int) -> Tensor:
    return torch.empty_like(snapshots)
