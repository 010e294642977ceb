"""Launch treewy::tree_conv_silu: convolution, activation, and what the commit needs where it finds it, in one kernel."""

from __future__ import annotations

from typing import Any

from treewy_inductor.lowerings.launch import Launch, Launcher, Strided, block, strides
from treewy_inductor.lowerings.tree_conv_silu_kernel import tree_conv_silu_kernel

# Nodes and channels a tile, and the most nodes a program. H200, 2026-11-30, 40 nodes, 8,192 channels in bfloat16, us: 16 rows
# 12.6 with the first, 25.7 with the second; 1 row 7.9 and 3.0.
MANY, FEW = (4, 256, 64), (16, 64, 16)
WARPS = 4
# Programs of the first that are enough, two for each multiprocessor of an H200.
ENOUGH = 264
# Columns that the kernel takes apart.
MOST_TAPS = 4


def launch_tree_conv_silu(
    launcher: Launcher,
    inputs: Any,
    history: Any,
    weight: Any,
    bias: Any,
    window: Any,
    first: int = 0,
    heads: int = 0,
    dim: int = 0,
    *,
    into: tuple[Any, Any] = (None, None),
    tile: tuple[int, int, int, int] | None = None,
) -> tuple[Strided, Strided, Strided]:
    """Run the kernel; return output and inputs, both ``[B, N, C]``, and the output's part ``[B, N, heads, dim]``.

    The other arguments are those of the op, see :mod:`treewy_inductor.ops_combined`.

    Args:
        into: where to keep the inputs, ``[B, C, N]`` with channels innermost, and the part; a new tensor if None.
        tile: nodes and channels a tile, nodes and warps a program, for measuring.
    """
    x, past, w, ancestor = (launcher.strided(value) for value in (inputs, history, weight, window))
    shift = w if bias is None else launcher.strided(bias)
    B, C, N = x.shape
    K = w.shape[1]
    block_n, block_c, nodes, warps = tile or _tile(B, C, N)
    output = launcher.empty((B, N, C), x.dtype, like=x)
    kept = launcher.empty((B, N, C), x.dtype, like=x) if into[0] is None else launcher.strided(into[0])
    part = launcher.empty((B, N, heads, dim), x.dtype, like=x) if into[1] is None else launcher.strided(into[1])
    results = {"output": output, "kept": kept, "part": part if heads else output}
    launcher.launch(
        Launch(
            tree_conv_silu_kernel,
            B * -(-C // block_c) * -(-N // nodes),
            {"inputs": x, "history": past, "weight": w, "bias": shift, "window": ancestor} | results,
            strides("inputs", x, "bcn")
            | strides("history", past, "bck")
            | strides("weight", w, "ck")
            | strides("bias", shift, "c")
            | strides("window", ancestor, "bnj")
            | {"C": C, "N": N, "K": K, "HAS_BIAS": bias is not None}
            | {"FIRST": first, "WIDTH": heads * dim, "NODES": nodes, "BLOCK_N": block_n, "BLOCK_C": block_c},
            warps,
        )
    )
    return output, kept, part


def _tile(rows: int, channels: int, nodes: int) -> tuple[int, int, int, int]:
    """Return nodes and channels a tile, nodes and warps a program."""
    programs = rows * -(-channels // MANY[1]) * -(-nodes // MANY[2])
    block_n, block_c, most = MANY if programs >= ENOUGH else FEW
    return min(block_n, block(nodes)), block_c, min(most, block(nodes)), WARPS
