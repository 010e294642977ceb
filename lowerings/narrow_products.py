"""Launch treewy::narrow_products: partial products of one matrix with two of few columns."""

from __future__ import annotations

from typing import Any

import torch

from treewy_inductor.lowerings.launch import Launch, Launcher, Strided, block, precisions, strides
from treewy_inductor.lowerings.narrow_products_kernel import narrow_products_kernel

# H200, 2026-12-01, two products of 640 rows and 2,560 channels with 32 columns, us: 4.3 with this tile, 4.4 to 5.3 with others
# of 16 or 32 rows a program, and 4.1 with 64 rows, 4 warps and 3 stages. Products of that one are wgmma, which would read what
# cp.async wrote, and Triton 3.6 puts no fence between; without copies that run ahead they take 7.2.
BLOCK_M, MOST_PARTS, BLOCK_K, STAGES = 32, 10, 64, 4


def launch_narrow_products(
    launcher: Launcher, x: Any, left: Any, right: Any, *, tile: tuple[int, int, int, int, int] | None = None
) -> Strided:
    """Return the partial products ``[S, M, L + R]`` float32 of ``x`` ``[M, K]`` with ``[K, L]`` and ``[K, R]``.

    Args:
        tile: rows a program, parts of K, elements of K a step, warps, and steps in flight, for measuring.
    """
    rows, a, b = (launcher.strided(each) for each in (x, left, right))
    M, K = rows.shape
    parts = max(1, min(MOST_PARTS, K // BLOCK_K))
    block_n = block(max(a.shape[1], b.shape[1]), 16)
    # Two warps have no registers for more.
    warps = 2 if block_n <= 32 and rows.dtype.itemsize <= 2 else 4
    block_m, splits, block_k, warps, stages = tile or (BLOCK_M, parts, BLOCK_K, warps, STAGES)
    share = -(-K // (splits * block_k)) * block_k
    splits = -(-K // share)
    partial = launcher.empty((splits, M, a.shape[1] + b.shape[1]), torch.float32, like=rows)
    launcher.launch(
        Launch(
            narrow_products_kernel,
            -(-M // block_m) * splits,
            {"x": rows, "left": a, "right": b, "partial": partial},
            strides("x", rows, "mk")
            | strides("left", a, "kn")
            | strides("right", b, "kn")
            | {"M": M, "K": K}
            | {"LEFT": a.shape[1], "RIGHT": b.shape[1], "SPLITS": splits, "SHARE": share}
            | {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
            | {"STAGES": stages, "PRECISION": precisions([rows])[1]},
            warps,
            stages,
        )
    )
    return partial
