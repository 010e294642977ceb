"""Launch treewy::best_token: the index of each row's largest logit, in parts that are then looked through."""

from __future__ import annotations

from typing import Any

import torch

from treewy_inductor.lowerings.best_token_kernel import best_of_part_kernel, best_of_parts_kernel
from treewy_inductor.lowerings.launch import Launch, Launcher, Strided, block

# H200, 2026-11-30, 248,320 tokens in bfloat16: 640 rows in 1, 2, 3, 4 parts take 103, 97, 101, 101 us, 40 rows in 16, 32, 64
# parts 10.5, 11.3, 14.0 us.
BUSY = 1280
BLOCK, WARPS, STAGES, MOST_PARTS = 2048, 4, 3, 16


def launch_best_token(launcher: Launcher, logits: Any, *, tile: tuple[int, int, int, int] | None = None) -> Strided:
    """Return ``[...]`` int64 for logits ``[..., V]``.

    Args:
        tile: parts of a row, elements a step, warps, and steps in flight, for measuring.
    """
    scores = launcher.strided(logits)
    *leading, V = scores.shape
    rows = scores.handle.numel() // V
    parts = max(1, min(MOST_PARTS, BUSY // max(rows, 1), V // (4 * BLOCK)))
    splits, lanes, warps, stages = tile or (parts, min(BLOCK, block(V)), WARPS, STAGES)
    share = -(-V // (splits * lanes)) * lanes
    splits = -(-V // share)
    tops = launcher.empty((rows, splits), torch.float32, like=scores)
    places = launcher.empty((rows, splits), torch.int32, like=scores)
    tokens = launcher.empty(leading, torch.int64, like=scores)
    parted = {"tops": tops, "places": places}
    launcher.launch(
        Launch(
            best_of_part_kernel,
            rows * splits,
            {"logits": scores} | parted,
            {"logits_r": V, "V": V, "SPLITS": splits, "SHARE": share, "BLOCK": lanes, "STAGES": stages},
            warps,
            stages,
        )
    )
    sizes = {"V": V, "SPLITS": splits, "BLOCK_S": block(splits)}
    launcher.launch(Launch(best_of_parts_kernel, rows, parted | {"tokens": tokens}, sizes, warps=1))
    return tokens
