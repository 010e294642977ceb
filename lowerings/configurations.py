"""Which tile a kernel uses at which shape: constants, each with the machine and date of the run that chose it.

Only configurations that passed the accuracy check of ``python -m bench.kernels --tune`` at that very shape may stand here.
"""

from __future__ import annotations

from typing import NamedTuple


class VerifyTile(NamedTuple):
    """Tile of tree_gated_delta_kernel."""

    block_v: int
    block_k: int
    warps: int
    stages: int


class OperatorsTile(NamedTuple):
    """Tile of tree_operators_kernel."""

    block_k: int
    columns: int
    warps: int
    lanes: int


class CommitTile(NamedTuple):
    """Tile of commit_state_kernel."""

    block_v: int
    warps: int


def verify_tile(block_n: int, K: int, V: int, exact_inputs: bool) -> VerifyTile:
    """Return the tile for ``block_n`` slots; ``exact_inputs`` means bfloat16 queries and keys."""
    block_v = 64 if V % 64 == 0 or V > 32 else 32
    block_k = 32
    if not exact_inputs:
        # Float32 products take tf32 operands: three times the registers.
        return VerifyTile(32 if block_n > 64 else block_v, 32 if block_n <= 64 else 16, 4 if block_n <= 64 else 8, 2)
    if block_n <= 64:
        return VerifyTile(block_v, block_k, 4, 3)
    return VerifyTile(32, block_k, 8, 2)


def operators_tile(block_n: int, K: int, programs: int) -> OperatorsTile:
    """Return the tile for ``block_n`` slots; ``programs`` is how many (row, key head) pairs there are."""
    warps = {16: 1, 32: 2, 64: 4, 128: 8, 256: 8}[block_n]
    lanes = 1 if programs >= 256 else block_n // 16
    return OperatorsTile(32, 16, warps, lanes)


def commit_tile(K: int, V: int, exact_inputs: bool) -> CommitTile:
    """Return the tile for states of ``K`` x ``V``; ``exact_inputs`` means bfloat16 keys."""
    return CommitTile(64 if K <= 128 and exact_inputs else 32, 4)
