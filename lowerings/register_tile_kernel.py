"""Tiles of the state, read into the registers in which a matrix unit takes a factor, and written from there.

Memory gives a thread 16 bytes of neighbouring keys at once; the matrix unit wants of each thread pairs of neighbours, 8 keys
apart. A product over keys is the same for any order of the keys. So the tile is read as memory has it, ``[8, w, 2, m, 4 PER]``:

    row 16 w + 8 h + i, key 4 PER m + PER q + 2 b + p     at     [i, w, h, m, (q, b, p)],   warps w, threads i and q

and taken for the matrix whose key ``2 q + p`` of the ``b``-th eight that is. On an NVIDIA matrix unit with 64 rows both are the
same registers: a tile crosses no shared memory and waits at no barrier, neither read nor written. Elsewhere it is converted.
"""

import triton
import triton.language as tl


@triton.jit
def places_in_tile(
    BLOCK_V: tl.constexpr,
    KEYS: tl.constexpr,
    PER: tl.constexpr,  # elements that a thread reads at once
):
    """Return value columns ``[8, BLOCK_V / 16, 2, 1, 1]`` and keys ``[1, 1, 1, KEYS / 4 PER, 4 PER]``, int32."""
    i = tl.arange(0, 8)[:, None, None, None, None]
    w = tl.arange(0, BLOCK_V // 16)[None, :, None, None, None]
    h = tl.arange(0, 2)[None, None, :, None, None]
    m = tl.arange(0, KEYS // (4 * PER))[None, None, None, :, None]
    e = tl.arange(0, 4 * PER)[None, None, None, None, :]
    return 16 * w + 8 * h + i, 4 * PER * m + e


@triton.jit
def cells_of_tile(
    state_k: tl.constexpr,
    state_v: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KEYS: tl.constexpr,
    PER: tl.constexpr,
):
    """Return where the elements of a tile lie, from its first on, ``[8, BLOCK_V / 16, 2, KEYS / 4 PER, 4 PER]`` int32."""
    column, key = places_in_tile(BLOCK_V, KEYS, PER)
    return column * state_v + key * state_k


@triton.jit
def in_tile(
    columns_left,  # int32 scalar, value columns from the tile's first on
    keys_left,  # int32 scalar, keys from the tile's first on
    BLOCK_V: tl.constexpr,
    KEYS: tl.constexpr,
    PER: tl.constexpr,
):
    """Return which elements of a tile exist, ``[8, BLOCK_V / 16, 2, KEYS / 4 PER, 4 PER]`` int1."""
    column, key = places_in_tile(BLOCK_V, KEYS, PER)
    return (column < columns_left) & (key < keys_left)


@triton.jit
def as_matrix(
    tile,  # [8, BLOCK_V / 16, 2, KEYS / 4 PER, 4 PER]
    BLOCK_V: tl.constexpr,
    KEYS: tl.constexpr,
    PER: tl.constexpr,
):
    """Return the tile for the matrix unit, ``[BLOCK_V, KEYS]``: value columns, and keys in its order."""
    tile = tl.reshape(tile, [8, BLOCK_V // 16, 2, KEYS // (4 * PER), 4, PER // 2, 2])
    return tl.reshape(tl.permute(tile, [1, 2, 0, 3, 5, 4, 6]), [BLOCK_V, KEYS])


@triton.jit
def as_memory(
    matrix,  # [BLOCK_V, KEYS]
    BLOCK_V: tl.constexpr,
    KEYS: tl.constexpr,
    PER: tl.constexpr,
):
    """Return the tile as memory has it, ``[8, BLOCK_V / 16, 2, KEYS / 4 PER, 4 PER]``: :func:`as_matrix` turned back."""
    matrix = tl.reshape(matrix, [BLOCK_V // 16, 2, 8, KEYS // (4 * PER), PER // 2, 4, 2])
    return tl.reshape(tl.permute(matrix, [2, 0, 1, 3, 5, 4, 6]), [8, BLOCK_V // 16, 2, KEYS // (4 * PER), 4 * PER])


@triton.jit
def keys_of_matrix(
    rows,  # [M, KEYS]
    KEYS: tl.constexpr,
    PER: tl.constexpr,
):
    """Return the rows with their keys in the order of :func:`as_matrix`."""
    rows = tl.reshape(rows, [rows.shape[0], KEYS // (4 * PER), 4, PER // 2, 2])
    return tl.reshape(tl.permute(rows, [0, 1, 3, 2, 4]), [rows.shape[0], KEYS])
