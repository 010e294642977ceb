"""Fold what was accepted last into a state that is read: ``S = exp(G) S_0 + sum over the path of exp(G - g_j) k_j u_j^T``.

The path lies in a trunk of at most 16 slots, one inner dimension of the matrix unit, so that a tile is folded by one product
whose accumulator it is. The tile is stored where it was read and goes on, in registers and as it was stored, to be multiplied
with keys and queries: one read and one write of the state for a commit and a verification. Nobody else reads these cells, and
whoever launches sees to it that the trunk is empty the next time. FLOPs: 2 x 16 K V a head in each bfloat16 term.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product
from treewy_inductor.lowerings.register_tile_kernel import as_matrix, as_memory, cells_of_tile, in_tile


@triton.jit
def load_path_keys(
    trunk_keys,  # [B, T, HK, K] float, contiguous
    length,  # int32 scalar, slots in use
    first,  # int32 scalar, first channel
    ib,
    ik,
    CHANNELS: tl.constexpr,
    T: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
):
    """Return those channels of the accepted keys, ``[16, CHANNELS]``, 0 in free slots and past ``K``."""
    j = tl.arange(0, 16)
    d = first + tl.arange(0, CHANNELS)
    rows = trunk_keys + ((ib * T + j) * HK + ik) * K
    return tl.load(rows[:, None] + d[None, :], mask=(j < length)[:, None] & (d < K)[None, :], other=0.0)


@triton.jit
def load_path_values(
    trunk_values,  # [B, T, HV, V] float32, contiguous
    length,
    ib,
    ih,
    c,  # [BLOCK_V] int32, value columns
    T: tl.constexpr,
    HV: tl.constexpr,
    V: tl.constexpr,
):
    """Return ``u_j`` of those columns, ``[BLOCK_V, 16]`` float32, 0 in free slots."""
    j = tl.arange(0, 16)
    rows = trunk_values + ((ib * T + j) * HV + ih) * V
    return tl.load(rows[None, :] + c[:, None], mask=(c < V)[:, None] & (j < length)[None, :], other=0.0)


@triton.jit
def read_tile(
    tile,  # pointer to the first element of a tile of the state
    columns_left,
    keys_left,
    state_k: tl.constexpr,
    state_v: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KEYS: tl.constexpr,
    PER: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # all elements of all tiles exist
):
    """Return the tile as memory has it, 0 where there is none."""
    cells = tile + cells_of_tile(state_k, state_v, BLOCK_V, KEYS, PER)
    return tl.load(cells) if IS_WHOLE else tl.load(cells, mask=in_tile(columns_left, keys_left, BLOCK_V, KEYS, PER), other=0.0)


@triton.jit
def fold_into_tile(
    S,  # [8, BLOCK_V / 16, 2, KEYS / 4 PER, 4 PER] as the state, of read_tile
    u,  # [BLOCK_V, 16] float32, values of the path times their weights
    k,  # [16, KEYS] float, accepted keys in the order of the matrix unit
    decay,  # float32 scalar, exp(G)
    length,
    tile,
    columns_left,
    keys_left,
    state_k: tl.constexpr,
    state_v: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KEYS: tl.constexpr,
    PER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the tile folded, as it was stored, ``[BLOCK_V, KEYS]``; one of a row that accepted nothing is not stored again."""
    S = exact_product(u, k, as_matrix(S, BLOCK_V, KEYS, PER).to(tl.float32) * decay, PRECISION).to(S.dtype)
    is_stored = in_tile(tl.where(length > 0, columns_left, 0), keys_left, BLOCK_V, KEYS, PER)
    tl.store(tile + cells_of_tile(state_k, state_v, BLOCK_V, KEYS, PER), as_memory(S, BLOCK_V, KEYS, PER), mask=is_stored)
    return S
