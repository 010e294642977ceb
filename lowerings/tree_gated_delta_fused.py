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
from treewy_inductor.lowerings.tree_gated_delta import has_bulk_prefetch, launch_tree_gated_delta
from treewy_inductor.lowerings.tree_gated_delta_fused_kernel import tree_gated_delta_fused_kernel

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
    folded = {"T": T, "HK": HK, "GROUPS": HV // HK, "K": K, "V": V}
    trunks = {f"trunk_{name}": x for name, x in zip(("keys", "scale", "values", "decay", "length"), trunk, strict=True)}
    if tile is None or max(N, T) > BLOCK:
        commit = commit_tile(K, V, precision == "bf16x3")
        launcher.launch(
            Launch(
                fold_state_kernel,
                B * HV * -(-V // commit.block_v),
                {"state": S} | trunks,
                strides("state", S, "bhkv")
                | folded
                | {"BLOCK_V": commit.block_v, "BLOCK_K": block(K, 16), "PRECISION": precision},
                commit.warps,
            )
        )
        tree = ancestors, order, internal, height
        floats = query, key, value, log_decay, beta, state
        return launch_tree_gated_delta(launcher, *floats, *tree, scale, norm_eps, out_dtype, into=into)

    log_a, b = launcher.strided(log_decay), launcher.strided(beta)
    # A float32 is the sum of three bfloat16; products with bfloat16 values are exact so.
    value_terms = 0
    if precision == "bf16x3" and v.dtype == torch.bfloat16:
        value_terms = 1 if b.dtype == torch.bfloat16 else 3
    block_k = block(K, 32)
    v_blocks = -(-V // tile.block_v)
    parts = tile.parts if v_blocks % tile.parts == 0 else 1
    # Parts that lie in memory as one piece can be asked for by one instruction of Hopper's and later chips.
    is_contiguous = S.stride[2:] == (1, K) and block_k == K and V % tile.block_v == 0
    is_fetchable = is_contiguous and S.device_type == "cuda" and has_bulk_prefetch()
    o = launcher.empty((B, N, HV, V), out_dtype, like=k)
    u, g, k_scale = (
        launcher.empty(shape, torch.float32, like=k) if buffer is None else launcher.strided(buffer)
        for shape, buffer in zip(((B, N, HV, V), (B, N, HV), (B, N, HK)), into, strict=True)
    )
    launcher.launch(
        Launch(
            tree_gated_delta_fused_kernel,
            B * HV * (v_blocks // parts),
            {"query": q, "key": k, "value": v, "log_decay": log_a, "beta": b, "state": S}
            | {"ancestors": launcher.strided(ancestors), "height": launcher.strided(height)}
            | trunks
            | {"output": o, "pseudo_values": u, "path_decay": g, "key_scale": k_scale},
            strides("query", q, "bnh")
            | strides("key", k, "bnh")
            | strides("value", v, "bnh")
            | strides("log_decay", log_a, "bnh")
            | strides("beta", b, "bnh")
            | strides("state", S, "bhkv")
            | folded
            | {
                "N": N,
                "SCALE": scale,
                "NORM_EPS": norm_eps,
                "PARTS": parts,
                "BLOCK_V": tile.block_v,
                "BLOCK_K": block_k,
                "STAGES": tile.stages,
                "IS_FETCHED": tile.is_fetched and is_fetchable,
                "PRECISION": precision,
                "SOLVE_PRECISION": "bf16x3" if precision == "bf16x3" else solve_precision,
                "VALUE_TERMS": value_terms,
                "VALUE_PRECISION": solve_precision,
            },
            tile.warps,
            tile.stages,
            registers=None if torch.version.hip else tile.registers,
        )
    )
    return o, u, g, k_scale
