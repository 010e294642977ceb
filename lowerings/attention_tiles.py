"""Which tile the attention kernel uses at which shape, and into how many parts it splits the positions."""

from __future__ import annotations

from typing import NamedTuple

from treewy_inductor.lowerings.launch import block

# Programs that keep an H200 (132 multiprocessors) or a B200 (148) busy when each fills one.
BUSY = 132
# Longest part in positions: a row far longer than its neighbours must not leave one program behind.
LONGEST_PART = 8192
MOST_PARTS = 32


class AttentionTile(NamedTuple):
    """Tile of tree_attention_kernel.

    Attributes:
        block_m: pairs of node and query head a program.
        block_l: positions a block.
        chunk: of the key dimension in a product.
        stages: blocks of the cache in flight.
        splits: parts of the positions.
    """

    block_m: int
    block_l: int
    warps: int
    chunk: int
    stages: int
    splits: int


def attention_tile(rows: int, heads: int, positions: int, dim: int, bytes_an_element: int) -> AttentionTile:
    """Return the tile, for bfloat16 heads of 256 the first of this table with the key dimension in chunks of 64.

    With one chunk of 256 it spills 64 to 112 bytes of registers, with chunks of 64 none.

    H200, 2026-11-30, ``python -m bench.attention --tune`` at commit 24faca3, 40 nodes, 8 query and 2 key heads, microseconds:

        block_m, block_l, warps, stages    16 rows, 1k tokens    1 row, 1k tokens    1 row, 32k tokens
        64, 32, 4, 3                                     31.8                11.5                 56.6
        64, 32, 8, 3                                     49.6                11.7                 91.3
        64, 64, 8, 2                                     44.5                10.9                 88.2
        128, 64, 8, 2                                    43.0                13.1                 52.7
        32, 64, 4, 2                                                         10.4                 97.5

    Args:
        rows: pairs of node and query head that share a key head.
        heads: key heads of all batch rows together.
        positions: of the cache; how many of them a row holds is not known here.
        dim: the larger of key and value dim.
    """
    warps = 4
    if bytes_an_element > 2:
        # Split operands of float32 products take many registers.
        block_m, block_l, chunk, stages, warps = 16, 32, 64, 1, 8 if dim > 128 else 4
    elif dim > 128:
        block_m, block_l, chunk, stages = min(64, block(rows, 16)), 32, 64, 3
    else:
        block_m, block_l, chunk, stages = min(64, block(rows, 16)), 64, 256, 2
    programs = heads * -(-rows // block_m)
    splits = max(round(BUSY / programs), -(-positions // LONGEST_PART))
    return AttentionTile(block_m, block_l, warps, chunk, stages, min(max(splits, 1), MOST_PARTS, -(-positions // block_l)))
