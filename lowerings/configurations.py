"""Which tile a kernel uses at which shape: constants, each with the machine and date of the run that chose it.

Only configurations that passed the accuracy check of ``python -m bench.kernels --tune`` at that very shape may stand here.
"""

from __future__ import annotations

from typing import NamedTuple


class VerifyTile(NamedTuple):
    """Tile of tree_gated_delta_kernel.

    Attributes:
        block_v: value columns a program.
        stream: of the key dimension in a step of streaming the state.
        stages: such steps in flight.
        heads: value heads a program, if they divide those of a key head.
        parts: blocks of value columns a program, if they divide their number.
        is_fetched: a program asks for the next part of the state to be fetched into L2.
        registers: most a thread may use, so that enough programs are in flight; none lets the compiler choose.
    """

    block_v: int
    warps: int
    stream: int
    stages: int
    heads: int = 1
    parts: int = 1
    is_fetched: bool = True
    registers: int | None = None


class CommitTile(NamedTuple):
    """Tile of commit_state_kernel."""

    block_v: int
    warps: int


def verify_tile(N: int, K: int, V: int, exact_inputs: bool, heads: int) -> VerifyTile:
    """Return the tile for ``N`` nodes; ``exact_inputs`` means bfloat16 queries and keys, ``heads`` counts those of all rows.

    H200, 2026-11-30, commit c010adb, 16/32 heads, dims 128/128: at 128 rows 101 us for 4 nodes, 111 for 15, 229 for 40; at 8
    rows 10.5, 11.1 and 21.5. With 64 value columns and one part a program 40 nodes compiled to wrong results.
    """
    if K <= 128 and exact_inputs and N <= 16 and V % 128 == 0:
        # So few programs all run at once: what counts is the chain of one.
        return VerifyTile(128, 4, 32, 3) if heads <= 512 else VerifyTile(128, 4, 16, 4, registers=128)
    if K <= 128 and exact_inputs and V % 128 == 0:
        return VerifyTile(64, 4, 32, 3, parts=2, registers=168)
    if K <= 128 and exact_inputs and V % 64 == 0 and N <= 16:
        return VerifyTile(64, 4, 32, 3)
    return VerifyTile(32, 4, 32, 2)


def commit_tile(K: int, V: int, exact_inputs: bool) -> CommitTile:
    """Return the tile for states of ``K`` x ``V``: on the same H200 and day the fastest of five, 1.13 times a copy."""
    return CommitTile(32, 4)
