"""Which tile a kernel uses at which shape: constants, each with the machine and date of the run that chose it.

Only configurations that passed the accuracy check of ``python -m bench.kernels --tune`` at that very shape may stand here.
"""

from __future__ import annotations

from typing import NamedTuple


class VerifyTile(NamedTuple):
    """Tile of tree_gated_delta_kernel.

    Attributes:
        block_v: value columns a program.
        chunk: of the key dimension in products of keys with keys.
        ahead: programs between asking for a part of the state and reading it.
        stream: of the key dimension in a step of streaming the state, for trees of one block.
        stages: such steps in flight.
        registers: most a thread may use, so that enough programs are in flight; none lets the compiler choose.
    """

    block_v: int
    warps: int
    chunk: int
    ahead: int
    stream: int
    stages: int
    registers: int | None


class CommitTile(NamedTuple):
    """Tile of commit_state_kernel."""

    block_v: int
    warps: int


def verify_tile(N: int, K: int, V: int, exact_inputs: bool) -> VerifyTile:
    """Return the tile for ``N`` nodes; ``exact_inputs`` means bfloat16 queries and keys."""
    if K <= 128 and V % 128 == 0 and N <= 16 and exact_inputs:
        # H200, 16/32 heads of 128, 2026-11-30: of ten the fastest at 4 and 15 nodes, within 1% at 15 and batch 128.
        return VerifyTile(128, 4, 32, 264, 32, 3, None)
    columns = 64 if K <= 128 and exact_inputs else 32
    # The fastest at 40 nodes that a compiled graph can use, which sets no register limit; same run.
    return VerifyTile(columns if V % columns == 0 else 32, 4, 64 if N > 16 else 32, 264, 32, 3, None)


def commit_tile(K: int, V: int, exact_inputs: bool) -> CommitTile:
    """Return the tile for states of ``K`` x ``V``: on the same H200 and day the fastest of five, 1.13 times a copy."""
    return CommitTile(32, 4)
