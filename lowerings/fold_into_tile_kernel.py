"""Fold what was accepted last into a state that is read: ``S = exp(G) S_0 + sum over the path of exp(G - g_j) k_j u_j^T``.

The path lies in a trunk of at most 16 slots, one inner dimension of the matrix unit, so that a tile is folded by one product
whose accumulator it is. The tile is stored where it was read and goes on, in registers and as it was stored, to be multiplied
with keys and queries: one read and one write of the state for a commit and a verification. Nobody else reads these cells, and
whoever launches sees to it that the trunk is empty the next time. FLOPs: 2 x 16 K V a head in each bfloat16 term.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product


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
    weight,  # [16] float32, of load_trunk_weights
    length,
    ib,
    ih,
    c,  # [BLOCK_V] int32, value columns
    T: tl.constexpr,
    HV: tl.constexpr,
    V: tl.constexpr,
):
    """Return ``weight_j u_j`` of those columns, ``[BLOCK_V, 16]`` float32, 0 in free slots."""
    j = tl.arange(0, 16)
    rows = trunk_values + ((ib * T + j) * HV + ih) * V
    u = tl.load(rows[None, :] + c[:, None], mask=(c < V)[:, None] & (j < length)[None, :], other=0.0)
    return u * weight[None, :]


@triton.jit
def fold_into_half(
    S,  # [BLOCK_V, BLOCK_K / 2] as the state, a half tile as it was read
    u,  # [BLOCK_V, 16] float32, of load_path_values
    k,  # [16, BLOCK_K / 2] float, the same half of the accepted keys
    decay,  # float32 scalar, exp(G)
    length,
    state,  # [K, V] at strides state_k, state_v, of this head
    c,  # [BLOCK_V] int32, value columns
    half: tl.constexpr,
    state_k: tl.constexpr,
    state_v: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the half tile folded, as it was stored; a row that accepted nothing is not stored again."""
    folded = exact_product(u, k, S.to(tl.float32) * decay, PRECISION).to(state.dtype.element_ty)
    e = half * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    cells = state + c[:, None] * state_v + e[None, :] * state_k
    is_stored = c < tl.where(length > 0, V, 0)
    if BLOCK_K == K:
        tl.store(cells, folded, mask=is_stored[:, None])
    else:
        tl.store(cells, folded, mask=is_stored[:, None] & (e < K)[None, :])
    return folded
