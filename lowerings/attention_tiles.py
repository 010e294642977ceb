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
        held: whether the queries stay in shared memory, in at most four chunks, or are read again for each block.
    """

    block_m: int
    block_l: int
    warps: int
    chunk: int
    stages: int
    splits: int
    held: bool = True


def attention_tile(rows: int, heads: int, positions: int, dim: int, bytes_an_element: int) -> AttentionTile:
    """Return the tile.

    Queries of 256 dims are multiplied in chunks of 64, since with one of 256 a thread spills registers. Held in shared memory,
    with blocks of 16 positions, they leave room for two programs a multiprocessor; read again for each block, of 32, for one,
    which is then the faster one.

    H200, 2026-11-30, 40 nodes, 4 query heads a key head, 1,024 tokens, microseconds (the sum over parts included):

        rows    key heads    parts    held, 2 stages    read again, 3 stages
          16            4        1              60.9                    74.6
          16            4        2              84.6                    83.1
          16            2        1              48.5                    37.7
           1            4       11              12.0                    13.2

    Slower everywhere: 64 positions a block, 32 or 128 pairs of node and head a program, 8 warps.

    Args:
        rows: pairs of node and query head that share a key head.
        heads: key heads of all batch rows together.
        positions: of the cache; how many of them a row holds is not known here.
        dim: the larger of key and value dim.
    """
    block_m = min(64, block(rows, 16)) if bytes_an_element <= 2 else 16
    programs = heads * -(-rows // block_m)
    splits = max(round(BUSY / programs), -(-positions // LONGEST_PART), 1)
    held = bytes_an_element <= 2 and splits == 1 and programs > BUSY
    warps = 4
    if bytes_an_element > 2:
        # Split operands of float32 products take many registers.
        block_l, chunk, stages, warps = 32, 64, 1, 8 if dim > 128 else 4
    elif dim > 128:
        block_l, chunk, stages = (16, 64, 3) if held else (32, 64, 3)
    else:
        block_l, chunk, stages = 64, 256, 2
    return AttentionTile(block_m, block_l, warps, chunk, stages, min(splits, MOST_PARTS, -(-positions // block_l)), held)
