"""Launch treewy::tree_gated_delta_snapshots: every node's state in one kernel, into the cache's own buffer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from treewy_inductor.lowerings.launch import Launch, Launcher, Strided, block, strides
from treewy_inductor.lowerings.tree_gated_delta_snapshots_kernel import tree_gated_delta_snapshots_kernel


class SnapshotTile(NamedTuple):
    """Tile of tree_gated_delta_snapshots_kernel: value columns and warps of a program."""

    block_v: int
    warps: int


# `python -m bench.tune_policies`, H200, 2026-11-30, commit cbe172b: the fastest of nine on a chain and on 40 nodes, at few rows
# and at many; 1.3 to 1.5 times faster than four warps on 32 columns.
TILE = SnapshotTile(16, 1)


def launch_tree_gated_delta_snapshots(
    launcher: Launcher,
    query: Any,
    key: Any,
    value: Any,
    log_decay: Any,
    beta: Any,
    parents: Any,
    accepted: Any,
    snapshots: Any,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
    *,
    tile: SnapshotTile = TILE,
) -> Strided:
    """Overwrite ``snapshots`` and return the output; arguments as :mod:`treewy_inductor.ops_store_all` says.

    Args:
        tile: to use in place of the constant, for measuring.
    """
    q, k, v = (launcher.strided(x, contiguous=[3]) for x in (query, key, value))
    log_a, b = launcher.strided(log_decay), launcher.strided(beta)
    links, row, S = launcher.strided(parents), launcher.strided(accepted), launcher.strided(snapshots)
    B, N, HK, K = k.shape
    HV, V = v.shape[2:]
    block_v = min(tile.block_v, block(V))
    o = launcher.empty((B, N, HV, V), out_dtype, like=k)
    launcher.launch(
        Launch(
            tree_gated_delta_snapshots_kernel,
            B * HV * -(-V // block_v),
            dict(zip(("query", "key", "value", "log_decay", "beta"), (q, k, v, log_a, b), strict=True))
            | {"parents": links, "accepted": row, "snapshots": S, "output": o},
            strides("query", q, "bnh")
            | strides("key", k, "bnh")
            | strides("value", v, "bnh")
            | strides("log_decay", log_a, "bnh")
            | strides("beta", b, "bnh")
            | strides("snapshots", S, "bnhkv")
            | {"N": N, "SCALE": scale, "NORM_EPS": norm_eps, "HK": HK, "GROUPS": HV // HK, "K": K, "V": V}
            | {"BLOCK_V": block_v, "BLOCK_K": block(K)},
            tile.warps,
        )
    )
    return o
