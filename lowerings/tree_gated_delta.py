"""Lower treewy::tree_gated_delta, with or without a trunk, to the kernels of verification.

Trees of at most 16 nodes are one launch, and so are those of more than 64. Between them a tree's own shape, which stands on the
device, decides which of two kernels takes it, and both are launched.

A layout that the kernel cannot address is copied into one that it can, never refused. A decay of its own for each channel
(log_decay [B, N, HV, K]) and float64 states are computed by the reference's own operations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from treewy_inductor.lowerings.configurations import BY_BLOCKS, VerifyTile, verify_tile
from treewy_inductor.lowerings.launch import Launch, Launcher, Strided, block, precisions, strides
from treewy_inductor.lowerings.tree_gated_delta_by_blocks_kernel import tree_gated_delta_by_blocks_kernel
from treewy_inductor.lowerings.tree_gated_delta_kernel import tree_gated_delta_kernel

# Of the launch that seeks the rows that are its own: about four a multiprocessor of an H200 or B200.
SEEKING_PROGRAMS = 528


@functools.cache
def has_bulk_prefetch() -> bool:
    """Whether the chip, or the one compiled for where there is none, is an NVIDIA one of capability 9.0 or more."""
    return not torch.version.hip and (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0))


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
    log_a, b = launcher.strided(log_decay), launcher.strided(beta)
    trees = [launcher.strided(x) for x in (ancestors, order, internal, height)]
    B, N, HK, K = k.shape
    HV, V = v.shape[2:]
    precision, solve_precision = precisions([q, k])
    trunks = [launcher.strided(x) for x in trunk] if trunk is not None else [q] * 5
    # A float32 is the sum of three bfloat16; products with bfloat16 values are exact so.
    value_terms = 0
    if precision == "bf16x3" and v.dtype == torch.bfloat16:
        value_terms = 1 if b.dtype == torch.bfloat16 else 3
    tile = verify or verify_tile(N, K, V, precision == "bf16x3", B * HV if trunk is None else 0)
    block_k = block(K, 32)

    o = launcher.empty((B, N, HV, V), out_dtype, like=k)
    u, g, k_scale = (
        launcher.empty(shape, torch.float32, like=k) if buffer is None else launcher.strided(buffer)
        for shape, buffer in zip(((B, N, HV, V), (B, N, HV), (B, N, HK)), into, strict=True)
    )
    tensors = (
        dict(zip(("query", "key", "value", "log_decay", "beta", "state"), (q, k, v, log_a, b, S), strict=True))
        | dict(zip(("ancestors", "order", "internal", "height"), trees, strict=True))
        | {f"trunk_{name}": x for name, x in zip(("keys", "scale", "values", "decay", "length"), trunks, strict=True)}
        | {"output": o, "pseudo_values": u, "path_decay": g, "key_scale": k_scale}
    )
    constants = (
        strides("query", q, "bnh")
        | strides("key", k, "bnh")
        | strides("value", v, "bnh")
        | strides("log_decay", log_a, "bnh")
        | strides("beta", b, "bnh")
        | strides("state", S, "bhkv")
        | {"N": N, "SCALE": scale, "NORM_EPS": norm_eps, "HK": HK, "GROUPS": HV // HK, "K": K, "V": V}
        | {
            "T": trunks[0].shape[1] if trunk is not None else 0,
            "BLOCK_K": block_k,
            "PRECISION": precision,
            "SOLVE_PRECISION": "bf16x3" if precision == "bf16x3" else solve_precision,
        }
    )
    # Tiles of fewer columns than the matrix unit's 64 rows would hold all their keys in registers.
    has_tiles = N <= 64 and tile.block_v >= 64
    if has_tiles:
        v_blocks = -(-V // tile.block_v)
        parts = tile.parts if v_blocks % tile.parts == 0 else 1
        # Parts that lie in memory as one piece can be asked for by one instruction of Hopper's and later chips.
        is_contiguous = S.stride[2:] == (1, K) and block_k == K and V % tile.block_v == 0
        of_tiles = {
            "SLOTS": 16 + block(N - 16, 16) if N > 16 else 16,
            "HEADS": tile.heads,
            "PARTS": parts,
            "BLOCK_V": tile.block_v,
            "STAGES": tile.stages,
            "IS_FETCHED": tile.is_fetched and is_contiguous and S.device_type == "cuda" and has_bulk_prefetch(),
            "VALUE_TERMS": value_terms,
            "VALUE_PRECISION": solve_precision,
        }
        grid, registers = B * HV // tile.heads * (v_blocks // parts), None if torch.version.hip else tile.registers
        launcher.launch(
            Launch(tree_gated_delta_kernel, grid, tensors, constants | of_tiles, tile.warps, tile.stages, registers)
        )
    if N > 16 or not has_tiles:
        streamed = tile if tile.block_v < 64 else BY_BLOCKS
        units = B * HV * -(-V // streamed.block_v)
        by_blocks = {
            "B": B,
            "key_end": block_k,
            "W": trees[0].shape[2],
            "MOST_LEFT": 16 if has_tiles else -1,
            "BLOCK_V": streamed.block_v,
            "STREAM": min(streamed.stream, block_k),
            "STAGES": streamed.stages,
        }
        grid = min(units, SEEKING_PROGRAMS) if has_tiles else units
        launcher.launch(
            Launch(tree_gated_delta_by_blocks_kernel, grid, tensors, constants | by_blocks, streamed.warps, streamed.stages)
        )
    return o, u, g, k_scale
