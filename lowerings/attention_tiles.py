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
    """Return the tile.

    Args:
        rows: pairs of node and query head that share a key head.
        heads: key heads of all batch rows together.
        positions: of the cache; how many of them a row holds is not known here.
        dim: the larger of key and value dim.
    """
    # 64 x 256 sums and the scores in 4 warps, and the split operands of float32 products, do not fit a thread's registers.
    warps = 8 if dim > 128 else 4
    if bytes_an_element > 2:
        block_m, block_l, chunk, stages = 16, 32, 64, 1
    else:
        block_m, block_l, chunk, stages = min(64, block(rows, 16)), 64, 256, 2
    programs = heads * -(-rows // block_m)
    splits = max(round(BUSY / programs), -(-positions // LONGEST_PART))
    return AttentionTile(block_m, block_l, warps, chunk, stages, min(max(splits, 1), MOST_PARTS, -(-positions // block_l)))
