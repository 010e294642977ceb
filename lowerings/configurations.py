"""Which tile a kernel uses at which shape: constants, each with the machine and date of the run that chose it.

Only configurations that passed the accuracy check of ``python -m bench.kernels --tune`` at that very shape may stand here.
"""

from __future__ import annotations

from typing import NamedTuple


class VerifyTile(NamedTuple):
    """Tile of tree_gated_delta_kernel, or with fewer than 64 value columns of tree_gated_delta_by_blocks_kernel.

    Attributes:
        block_v: value columns a tile.
        stream: of the key dimension in a step of streaming the state block by block of nodes.
        stages: tiles, or such steps, in flight.
        parts: tiles a program, if they divide their number.
        is_fetched: a program asks for its first two tiles to be fetched into L2 before it loads them.
        registers: most a thread may use, so that enough programs are in flight; none lets the compiler choose.
        heads: value heads a program, 1 or, of one key head and with at most 16 nodes and no trunk, 2.
    """

    block_v: int
    warps: int
    stream: int
    stages: int
    parts: int = 1
    is_fetched: bool = True
    registers: int | None = None
    heads: int = 1


class FusedTile(NamedTuple):
    """Tile of tree_gated_delta_fused_kernel; attributes as of :class:`VerifyTile`."""

    block_v: int
    warps: int
    parts: int = 1
    is_fetched: bool = True
    registers: int | None = None


class CommitTile(NamedTuple):
    """Tile of commit_state_kernel."""

    block_v: int
    warps: int


# Of trees that go by blocks. More columns, or fewer warps, would not fit the registers of a thread.
BY_BLOCKS = VerifyTile(32, 4, 32, 2)


# Of an H200, and the programs that it runs at once.
MULTIPROCESSORS = 132
AT_ONCE = 4 * MULTIPROCESSORS


def verify_tile(N: int, K: int, V: int, exact_inputs: bool, states: int = 0, groups: int = 1) -> VerifyTile:
    """Return the tile for ``N`` nodes; ``exact_inputs`` means bfloat16 queries and keys.

    ``states`` of all rows and value heads, ``groups`` of these a key head; 0, as below a trunk: the tile for many, a head each.

    H200, 2026-11-30, 16/32 heads, dims 128/128. A head a program, 128 rows: 84.8 us for 4 nodes, 95.3 for 15; 40 nodes take 183
    with the limit on registers, with which three programs a multiprocessor run, and 211 without it.
    """
    if N <= 64 and K <= 128 and exact_inputs and V % 64 == 0:
        if N <= 16 and K == V == 128 and groups % 2 == 0 and states > MULTIPROCESSORS:
            # 15 nodes at 8 rows and a tile of each head 10.3 us, where a head a program took 10.9; at 128 rows and two of each
            # 86.2 for 95.0. At 12 rows one tile of each took 12.6 us and two 14.8, at 16 rows 18.6 and 16.4.
            is_few = states <= 3 * MULTIPROCESSORS
            return VerifyTile(64, 4, 32, 2 if is_few else 3, parts=1 if is_few else 2, heads=2)
        if N <= 16 and K == V == 128 and 0 < 2 * states <= AT_ONCE:
            # All run at once: 7.7 us for 15 nodes at 4 rows, where two tiles a program took 8.6 in the same run.
            return VerifyTile(64, 4, 32, 2, parts=1)
        is_limited = 16 < N <= 48 and K == V == 128 and states > 2 * MULTIPROCESSORS
        return VerifyTile(64, 4, 32, 2, parts=2 if V % 128 == 0 else V // 64, registers=168 if is_limited else None)
    return BY_BLOCKS


def commit_tile(K: int, V: int, exact_inputs: bool) -> CommitTile:
    """Return the tile for states of ``K`` x ``V``: on the same H200 and day the fastest of five, 1.13 times a copy.

    Past 128 keys of float16 or float32, whose products need more registers, half as many columns.
    """
    return CommitTile(32 if K <= 128 or exact_inputs else 16, 4)


def fused_tile(K: int, V: int, exact_inputs: bool) -> FusedTile | None:
    """Return the tile for trees and trunks of at most 16, or none where a fold and a verification are two launches.

    H200, 2026-11-30, 16/32 heads, dims 128/128, 128 rows, 15 nodes, 4 of them accepted: 176 us, 1.38 times a copy of the
    states. Without the limit on registers, as in compiled code, about 187 to 193 were measured for near variants.
    """
    if K <= 128 and exact_inputs and V % 64 == 0:
        return FusedTile(64, 4, parts=2 if V % 128 == 0 else V // 64, registers=168)
    return None
