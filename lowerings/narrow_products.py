"""Launch treewy::narrow_products: partial products of one matrix with two of few columns."""

from __future__ import annotations

from typing import Any

import torch

from treewy_inductor.lowerings.launch import Launch, Launcher, Strided, block, precisions, strides
from treewy_inductor.lowerings.narrow_products_kernel import narrow_products_kernel

# Programs that keep an H200 (132 multiprocessors) busy.
BUSY = 132
MOST_PARTS = 8
BLOCK_K, WARPS, STAGES = 128, 4, 3


def launch_narrow_products(
    launcher: Launcher, x: Any, left: Any, right: Any, *, tile: tuple[int, int, int, int, int] | None = None
) -> Strided:
    """Return the partial products ``[S, M, L + R]`` float32 of ``x`` ``[M, K]`` with ``[K, L]`` and ``[K, R]``.

    Args:
        tile: rows a program, parts of K, elements of K a step, warps, and steps in flight, for measuring.
    """
    rows, a, b = (launcher.strided(each) for each in (x, left, right))
    M, K = rows.shape
    block_m = 16 if M <= 512 else 32
    parts = max(1, min(MOST_PARTS, round(BUSY / -(-M // block_m)), K // BLOCK_K))
    block_m, splits, block_k, warps, stages = tile or (block_m, parts, BLOCK_K, WARPS, STAGES)
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
            | {"BLOCK_M": block_m, "BLOCK_N": block(max(a.shape[1], b.shape[1]), 16), "BLOCK_K": block_k}
            | {"STAGES": stages, "PRECISION": precisions([rows])[1]},
            warps,
            stages,
        )
    )
    return partial
