"""Lower treewy::tree_gated_delta_fused: one kernel for trees and trunks of at most 16, else a fold and a verification.

The state is overwritten where it lies, whatever its strides; every other layout that a kernel cannot address is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from treewy_inductor.lowerings.configurations import FusedTile, commit_tile, fused_tile
from treewy_inductor.lowerings.fold_state_kernel import fold_state_kernel
from treewy_inductor.lowerings.launch import Launch, Launcher, Strided, block, precisions, strides
from treewy_inductor.lowerings.tree_gated_delta import launch_tree_gated_delta
from treewy_inductor.lowerings.tree_gated_delta_fused_kernel import tree_gated_delta_fused_kernel
from treewy_inductor.lowerings.verify_arguments import (
    Floats,
    allocate_results,
    common_constants,
    is_hopper,
    tile_constants,
    trunk_tensors,
)

# Slots of the block that the fused kernel solves, and of the trunk that it folds by one product.
BLOCK = 16


def launch_tree_gated_delta_fused(
    launcher: Launcher,
    query: Any,
    key: Any,
    value: Any,
    log_decay: Any,
    beta: Any,
    state: Any,
    ancestors: Any,
    order: Any,
    internal: Any,
    height: Any,
    trunk_keys: Any,
    trunk_scale: Any,
    trunk_values: Any,
    trunk_decay: Any,
    trunk_length: Any,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
    *,
    into: Sequence[Any] = (None, None, None),
    tile: FusedTile | None = None,
) -> tuple[Strided, Strided, Strided, Strided]:
    """Overwrite ``state`` by the state above the root and verify against it, as :mod:`treewy_inductor.ops_fused` says.

    Args:
        into: tensors to write pseudo-values, path decays and key scales into, contiguous; None allocates one.
        tile: to use in place of that of the table, for measuring.
    """
    q, k, v = (launcher.strided(x, contiguous=[3]) for x in (query, key, value))
    S = launcher.strided(state)
    trunk = [launcher.strided(x) for x in (trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length)]
    B, N, HK, K = k.shape
    HV, V = v.shape[2:]
    T = trunk[0].shape[1]
    precision, solve_precision = precisions([q, k])
    tile = tile or fused_tile(K, V, precision == "bf16x3")
    if tile is None or max(N, T) > BLOCK:
        commit = commit_tile(K, V, precision == "bf16x3")
        launcher.launch(
            Launch(
                fold_state_kernel,
                B * HV * -(-V // commit.block_v),
                {"state": S} | trunk_tensors(trunk),
                strides("state", S, "bhkv")
                | {"T": T, "HK": HK, "GROUPS": HV // HK, "K": K, "V": V}
                | {"BLOCK_V": commit.block_v, "BLOCK_K": block(K, 16), "PRECISION": precision},
                commit.warps,
            )
        )
        tree = ancestors, order, internal, height
        inputs = query, key, value, log_decay, beta, state
        return launch_tree_gated_delta(launcher, *inputs, *tree, scale, norm_eps, out_dtype, into=into)

    floats = Floats(q, k, v, launcher.strided(log_decay), launcher.strided(beta), S)
    of_tiles = tile_constants(tile, floats, precision, solve_precision)
    results = allocate_results(launcher, floats, out_dtype, into)
    launcher.launch(
        Launch(
            tree_gated_delta_fused_kernel,
            B * HV * (-(-V // tile.block_v) // of_tiles["PARTS"]),
            floats._asdict()
            | {"ancestors": launcher.strided(ancestors), "height": launcher.strided(height)}
            | trunk_tensors(trunk)
            | results._asdict(),
            common_constants(floats, scale, norm_eps, T, precision, solve_precision) | of_tiles,
            tile.warps,
            # Found on an H200; another chip's compiler, which needs others, chooses.
            registers=tile.registers if is_hopper() else None,
        )
    )
    return results
