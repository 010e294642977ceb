"""Lower treewy::tree_gated_delta, with or without a trunk, to the kernels of verification.

Trees of at most 16 nodes are one launch, and so are those of more than 64. Between them a tree's own shape, which stands on the
device, decides which of two kernels takes it, and both are launched.

A layout that the kernel cannot address is copied into one that it can, never refused. A decay of its own for each channel
(log_decay [B, N, HV, K]) and float64 states are computed by the reference's own operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from treewy_inductor.lowerings.configurations import BY_BLOCKS, VerifyTile, verify_tile
from treewy_inductor.lowerings.launch import Launch, Launcher, Strided, block, precisions
from treewy_inductor.lowerings.tensor_memory import loops_lack_tensor_memory
from treewy_inductor.lowerings.tree_gated_delta_by_blocks_kernel import tree_gated_delta_by_blocks_kernel
from treewy_inductor.lowerings.tree_gated_delta_kernel import tree_gated_delta_kernel
from treewy_inductor.lowerings.verify_arguments import (
    Floats,
    allocate_results,
    common_constants,
    tile_constants,
    trunk_tensors,
)

# Of the launch that seeks the rows that are its own: about four a multiprocessor of an H200 or B200.
SEEKING_PROGRAMS = 528


def launch_tree_gated_delta(
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
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
    *,
    trunk: tuple[Any, Any, Any, Any, Any] | None = None,
    into: Sequence[Any] = (None, None, None),
    verify: VerifyTile | None = None,
) -> tuple[Strided, Strided, Strided, Strided]:
    """Run the kernels and return output, pseudo-values, path decays and key scales, as :mod:`treewy_inductor.ops` says.

    Args:
        trunk: keys, scales, values, decays and length of the trunk that the tree hangs from: :mod:`treewy_inductor.ops_replay`.
        into: tensors to write pseudo-values, path decays and key scales into, contiguous; None allocates one.
        verify: tile to use in place of that of the table, for measuring.
    """
    q, k, v = (launcher.strided(x, contiguous=[3]) for x in (query, key, value))
    S = launcher.strided(state, contiguous=[2, 3])
    floats = Floats(q, k, v, launcher.strided(log_decay), launcher.strided(beta), S)
    trees = [launcher.strided(x) for x in (ancestors, order, internal, height)]
    B, N, HK, K = k.shape
    HV, V = v.shape[2:]
    precision, solve_precision = precisions([q, k])
    trunks = [launcher.strided(x) for x in trunk] if trunk is not None else [q] * 5
    tile = verify or verify_tile(N, K, V, precision == "bf16x3", B * HV if trunk is None else 0, HV // HK)
    if verify is None and N > 16 and tile.parts > 1 and q.device_type == "cuda" and loops_lack_tensor_memory():
        # One tile a program is no loop: 256 columns, or 512 below a trunk of more than 16 slots, where two took up to 896.
        tile = tile._replace(parts=1)

    results = allocate_results(launcher, floats, out_dtype, into)
    tensors = (
        floats._asdict()
        | dict(zip(("ancestors", "order", "internal", "height"), trees, strict=True))
        | trunk_tensors(trunks)
        | results._asdict()
    )
    slots = trunks[0].shape[1] if trunk is not None else 0
    constants = common_constants(floats, scale, norm_eps, slots, precision, solve_precision)
    # Tiles of fewer columns than the matrix unit's 64 rows would hold all their keys in registers.
    has_tiles = N <= 64 and tile.block_v >= 64
    if has_tiles:
        of_tiles = tile_constants(tile, floats, precision, solve_precision)
        of_tiles |= {"SLOTS": 16 + block(N - 16, 16) if N > 16 else 16, "HEADS": tile.heads, "STAGES": tile.stages}
        grid = B * HV // tile.heads * (-(-V // tile.block_v) // of_tiles["PARTS"])
        registers = None if torch.version.hip else tile.registers
        launcher.launch(
            Launch(tree_gated_delta_kernel, grid, tensors, constants | of_tiles, tile.warps, tile.stages, registers)
        )
    if N > 16 or not has_tiles:
        streamed = tile if tile.block_v < 64 else BY_BLOCKS
        units = B * HV * -(-V // streamed.block_v)
        by_blocks = {
            "B": B,
            "key_end": constants["BLOCK_K"],
            "W": trees[0].shape[2],
            "MOST_LEFT": 16 if has_tiles else -1,
            "BLOCK_V": streamed.block_v,
            "STREAM": min(streamed.stream, constants["BLOCK_K"]),
            "STAGES": streamed.stages,
        }
        grid = min(units, SEEKING_PROGRAMS) if has_tiles else units
        launcher.launch(
            Launch(tree_gated_delta_by_blocks_kernel, grid, tensors, constants | by_blocks, streamed.warps, streamed.stages)
        )
    return results
