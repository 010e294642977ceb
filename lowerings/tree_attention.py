"""Lower treewy::tree_attention to one kernel, or to two if the positions are split into parts."""

from __future__ import annotations

import math
from typing import Any

import torch

from treewy_inductor.lowerings.attention_tiles import AttentionTile, attention_tile
from treewy_inductor.lowerings.launch import Launch, Launcher, Strided, block, precisions, strides
from treewy_inductor.lowerings.sum_parts_kernel import sum_parts_kernel
from treewy_inductor.lowerings.tree_attention_kernel import tree_attention_kernel


def launch_tree_attention(
    launcher: Launcher,
    query: Any,
    keys: Any,
    values: Any,
    ancestors: Any,
    lengths: Any,
    scale: float,
    *,
    tile: AttentionTile | None = None,
) -> Strided:
    """Run the kernels and return the output ``[B, N, H, E]``, as :mod:`treewy_inductor.ops_attention` says.

    Args:
        tile: to use in place of that of the table, for measuring.
    """
    q, k, v = (launcher.strided(x, contiguous=[3]) for x in (query, keys, values))
    A, length = launcher.strided(ancestors), launcher.strided(lengths)
    B, H, N, D = q.shape
    HK, L, E = v.shape[1:]
    groups = H // HK
    block_d, block_e = block(D, 16), block(E, 16)
    tile = tile or attention_tile(N * groups, B * HK, L, max(block_d, block_e), q.dtype.itemsize)
    S = tile.splits

    o = launcher.empty((B, N, H, E), q.dtype, like=q)
    # With one part the kernel writes the output itself, and these are only names.
    partial = launcher.empty((S, B, N, H, E), torch.float32, like=q) if S > 1 else o
    tops, totals = (launcher.empty((S, B, N, H), torch.float32, like=q) if S > 1 else o for _ in range(2))
    tree = {"ancestors": A, "lengths": length}
    tree_strides = strides("ancestors", A, "bnw") | strides("lengths", length, "b") | {"B": B, "L": L}
    sizes = {"N": N, "E": E, "SPLITS": S, "BLOCK_L": tile.block_l, "BLOCK_E": block_e}
    launcher.launch(
        Launch(
            tree_attention_kernel,
            B * HK * S * -(-N * groups // tile.block_m),
            {"query": q, "keys": k, "values": v, "output": o, "partial": partial, "tops": tops, "totals": totals} | tree,
            strides("query", q, "bhn")
            | strides("keys", k, "bhl")
            | strides("values", v, "bhl")
            | tree_strides
            | sizes
            | {
                "SCALE": scale * math.log2(math.e),
                "HK": HK,
                "GROUPS": groups,
                "D": D,
                "BLOCK_M": tile.block_m,
                "BLOCK_D": block_d,
                "CHUNK": min(tile.chunk, block_d),
                "HELD": tile.held or tile.chunk >= block_d,
                "STAGES": tile.stages,
            }
            | {"PRECISION": precisions([q])[1]},
            tile.warps,
            tile.stages,
        )
    )
    if S > 1:
        launcher.launch(
            Launch(
                sum_parts_kernel,
                B * N * H,
                {"partial": partial, "tops": tops, "totals": totals, "output": o} | tree,
                tree_strides | sizes | {"H": H, "BLOCK_S": block(S)},
                warps=4,
            )
        )
    return o
