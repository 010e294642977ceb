"""Launch treewy::tree_conv_silu: convolution, activation, and the nodes' inputs where the commit finds them, in one kernel."""

from __future__ import annotations

from typing import Any

from treewy_inductor.lowerings.launch import Launch, Launcher, Strided, block, strides
from treewy_inductor.lowerings.tree_conv_silu_kernel import tree_conv_silu_kernel

# Nodes and channels a tile, and the most nodes a program.
BLOCK_N, BLOCK_C, NODES = 16, 64, 64
# Columns that the kernel takes apart.
MOST_TAPS = 4


def launch_tree_conv_silu(
    launcher: Launcher,
    inputs: Any,
    history: Any,
    weight: Any,
    bias: Any,
    window: Any,
    *,
    into: Any = None,
    tile: tuple[int, int, int, int] | None = None,
) -> tuple[Strided, Strided]:
    """Run the kernel; return the output and the inputs once more, both ``[B, N, C]``.

    The other arguments are those of the op, see :mod:`treewy_inductor.ops_combined`.

    Args:
        into: where to keep the inputs, ``[B, C, N]`` with channels innermost; a new tensor if None.
        tile: nodes and channels a tile, nodes and warps a program, for measuring.
    """
    x, past, w, ancestor = (launcher.strided(value) for value in (inputs, history, weight, window))
    shift = w if bias is None else launcher.strided(bias)
    B, C, N = x.shape
    K = w.shape[1]
    block_n, block_c, nodes, warps = tile or (min(BLOCK_N, block(N)), BLOCK_C, min(NODES, block(N)), 4)
    output = launcher.empty((B, N, C), x.dtype, like=x)
    kept = launcher.empty((B, N, C), x.dtype, like=x) if into is None else launcher.strided(into)
    launcher.launch(
        Launch(
            tree_conv_silu_kernel,
            B * -(-C // block_c) * -(-N // nodes),
            {"inputs": x, "history": past, "weight": w, "bias": shift, "window": ancestor, "output": output, "kept": kept},
            strides("inputs", x, "bcn")
            | strides("history", past, "bck")
            | strides("weight", w, "ck")
            | strides("bias", shift, "c")
            | strides("window", ancestor, "bnj")
            | {"C": C, "N": N, "K": K, "HAS_BIAS": bias is not None}
            | {"NODES": nodes, "BLOCK_N": block_n, "BLOCK_C": block_c},
            warps,
        )
    )
    return output, kept
