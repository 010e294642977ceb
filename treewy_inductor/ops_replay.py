"""The ops and the marker of ``mamba_state_commit="replay"``: schema and fake kernel; the reference is their eager meaning.

    L layers  B batch  T trunk slots  N nodes  P path  HK key heads  HV value heads  K key dim  V value dim  W words of 64 nodes

A trunk is five tensors: trunk_keys [B,T,HK,K] as the model gave them; trunk_scale [B,T,HK] = 1/|key|; trunk_values
[B,T,HV,V], the pseudo-values; trunk_decay [B,T,HV] or [B,T,HV,K], path decays from the committed state on; trunk_length [B]
int32, slots in use. What lies in the other slots is never used.

    tree_gated_delta_trunk   the arguments of tree_gated_delta with a trunk after height. Returns what tree_gated_delta returns;
                             its path decays begin at the root, not at the committed state.
    commit_trunk             state [L,B,HV,K,V] and a trunk with leading L (but for trunk_length), overwritten; keys, key_scale,
                             pseudo_values, path_decay, path as in commit_state.
    state_in_trunk           marker: the arguments of state_in with a trunk after height; returns a state like it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor import ops, reference_replay

_TREE = "Tensor ancestors, Tensor order, Tensor internal, Tensor height"
_TRUNK = "Tensor trunk_keys, Tensor trunk_scale, Tensor trunk_values, Tensor trunk_decay, Tensor trunk_length"

torch.library.define(
    "treewy::tree_gated_delta_trunk",
    "(Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor beta, Tensor state, "
    f"{_TREE}, {_TRUNK}, float scale, float norm_eps, ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "treewy::commit_trunk",
    "(Tensor(a!) state, Tensor(b!) trunk_keys, Tensor(c!) trunk_scale, Tensor(d!) trunk_values, Tensor(e!) trunk_decay, "
    "Tensor(f!) trunk_length, Tensor keys, Tensor key_scale, Tensor pseudo_values, Tensor path_decay, Tensor path) -> ()",
)
torch.library.define("treewy::state_in_trunk", f"(Tensor state, {_TREE}, {_TRUNK}, int layer, int slot) -> Tensor")

for _name in ("tree_gated_delta_trunk", "commit_trunk"):
    torch.library.impl(f"treewy::{_name}", "CompositeExplicitAutograd", getattr(reference_replay, _name))
torch.library.impl("treewy::state_in_trunk", "CompositeExplicitAutograd", lambda *_: ops.marker_ran("state_in_trunk"))

tree_gated_delta_trunk = torch.ops.treewy.tree_gated_delta_trunk.default
commit_trunk = torch.ops.treewy.commit_trunk.default
state_in_trunk = torch.ops.treewy.state_in_trunk.default


def check_trunk(name: str, trunk: tuple[Tensor, Tensor, Tensor, Tensor], keys: Tensor, values: Tensor, decay: Tensor) -> None:
    """Check that a trunk is shaped like the nodes it receives, but for how many there are."""
    slots = trunk[0].shape[1]
    nodes = (keys.shape, keys.shape[:-1], values.shape, decay.shape)
    for label, held, node in zip(("trunk_keys", "trunk_scale", "trunk_values", "trunk_decay"), trunk, nodes, strict=True):
        expected = (node[0], slots, *node[2:])
        torch._check(
            tuple(held.shape) == expected,
            lambda label=label, held=held, expected=expected: (
                f"{name}: {label} is {list(held.shape)}, expected {list(expected)}"
            ),
        )


@torch.library.register_fake("treewy::tree_gated_delta_trunk")
def _tree_gated_delta_trunk_fake(
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
    check_trunk("tree_gated_delta_trunk", trunk, key, value, log_decay)
    return ops.tree_gated_delta(
        query, key, value, log_decay, beta, state, ancestors, order, internal, height, scale, norm_eps, out_dtype
    )


@torch.library.register_fake("treewy::commit_trunk")
def _commit_trunk_fake(
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
    trunk = (trunk_keys[0], trunk_scale[0], trunk_values[0], trunk_decay[0])
    check_trunk("commit_trunk", trunk, keys[0], pseudo_values[0], path_decay[0])
    torch._check(
        trunk_length.shape[0] == path.shape[0] == state.shape[1],
        lambda: (
            f"commit_trunk: trunk_length {list(trunk_length.shape)} and path {list(path.shape)} for "
            f"{state.shape[1]} rows: give one length and one path a row"
        ),
    )


@torch.library.register_fake("treewy::state_in_trunk")
def _state_in_trunk_fake(
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
    layer: int,
    slot: int,
) -> Tensor:
    return torch.empty_like(state, memory_format=torch.contiguous_format)
