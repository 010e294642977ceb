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


def verify_tile(N: int, K: int, V: int, exact_inputs: bool) -> VerifyTile:
    """Return the tile for ``N`` nodes; ``exact_inputs`` means bfloat16 queries and keys."""
    if K <= 128 and exact_inputs and N <= 16 and V % 128 == 0:
        return VerifyTile(128, 4, 32, 3)
    if K <= 128 and exact_inputs and V % 64 == 0:
        return VerifyTile(64, 4, 32, 3)
    return VerifyTile(32, 4, 32, 2)


def commit_tile(K: int, V: int, exact_inputs: bool) -> CommitTile:
    """Return the tile for states of ``K`` x ``V``: on the same H200 and day the fastest of five, 1.13 times a copy."""
    return CommitTile(32, 4)
