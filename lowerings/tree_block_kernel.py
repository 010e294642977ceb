"""What a block of 16 slots does to the slots of a verify program: i in the block, t any slot, i above t in the tree.

    G[t,i] = beta_t exp(g_t - g_i) (k_t . k_i), strict ancestors        P[t,i] = exp(g_t - g_i) (q_t . k_i), own term included

Norms multiply the products of raw keys and queries, which stay exact in bfloat16.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product


@triton.jit
def is_above(
    word,  # int64, 64 bits of a node's ancestors
    node,  # int32 below 64, broadcast with word
):
    """Return whether ``node`` is in ``word``: two 32-bit shifts, which cost less than one of 64."""
    low = word.to(tl.int32)
    high = (word >> 32).to(tl.int32)
    return ((tl.where(node < 32, low, high) >> (node & 31)) & 1) != 0


@triton.jit
def path_decays(
    word,  # [M] int64, the first 64 bits of each node's ancestors
    log_a,  # [C] float, log decays of nodes 0 to C - 1, C <= 64, finite where a node is an ancestor
):
    """Return ``g_t``, the sum of log decays over node t and its ancestors, ``[M]`` float32."""
    above = tl.arange(0, log_a.shape[0])
    # Summed over the first axis, which lies within threads: over the second each row would cost shuffles.
    A = is_above(word[None, :], above[:, None])
    return tl.sum(tl.where(A, log_a.to(tl.float32)[:, None], 0.0), 0)


@triton.jit
def state_step(
    state,  # [K, V] at strides state_k, state_v, of this head
    c,  # [BLOCK_V] int32, value columns
    start,
    state_k: tl.constexpr,
    state_v: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Return keys ``start`` to ``start + STREAM - 1`` of the state, transposed: ``[BLOCK_V, STREAM]``."""
    e = start + tl.arange(0, STREAM)
    if BLOCK_K == K and V % BLOCK_V == 0:
        S = tl.load(state + c[:, None] * state_v + e[None, :] * state_k)
    else:
        in_state = (c < V)[:, None] & (e < K)[None, :]
        S = tl.load(state + c[:, None] * state_v + e[None, :] * state_k, mask=in_state, other=0.0)
    return S


@triton.jit
def columns(
    x,  # [M, 2 C] float32, or some of these, [H, M, 2 C]
    half: tl.constexpr,
):
    """Return columns ``C half`` to ``C half + C - 1`` of ``x``, ``[M, C]`` or ``[H, M, C]``."""
    if len(x.shape) == 3:
        left, right = tl.split(tl.permute(tl.reshape(x, [x.shape[0], x.shape[1], 2, x.shape[2] // 2]), [0, 1, 3, 2]))
    else:
        left, right = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))
    return left if half == 0 else right


@triton.jit
def halves(
    x,  # [2 M]
):
    """Return the first and the last ``M`` elements of ``x``."""
    return tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2]), [1, 0]))


@triton.jit
def first_half(
    x,  # [2 M]
):
    """Return the first ``M`` elements of ``x``."""
    first, _ = halves(x)
    return first


@triton.jit
def raw_product(
    x,  # [M, BLOCK_K] float
    y,  # [C, BLOCK_K] float
    PRECISION: tl.constexpr,
):
    """Return ``x_t . y_i``, ``[M, C]`` float32."""
    return exact_product(x, tl.trans(y), tl.zeros([x.shape[0], y.shape[0]], tl.float32), PRECISION)


@triton.jit
def solve(
    X,  # [16, 32] float32, or some of these: L in the left half, nilpotent, and any columns in the right one
    height,  # int32 scalar, L^height = 0
    PRECISION: tl.constexpr,
):
    """Return ``(I - L)^-1 X = (I + L)(I + L^2)(I + L^4)... X``, exact after about log2(height) products."""
    L = columns(X, 0)
    X = exact_product(L, X, X, PRECISION)
    if height > 2:
        # The left half is L + L^2 now, and exactly L where L^2 has no path.
        power = columns(X, 0) - L
        X = exact_product(power, X, X, PRECISION)
        span = 4
        while span < tl.minimum(height, 16):
            power = exact_product(power, power, tl.zeros(power.shape, tl.float32), PRECISION)
            X = exact_product(power, X, X, PRECISION)
            span *= 2
    return X
