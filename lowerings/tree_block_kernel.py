"""What a block of 16 slots does to the slots of a verify program: i in the block, t any slot, i above t in the tree.

    G[t,i] = beta_t exp(g_t - g_i) (k_t . k_i), strict ancestors        P[t,i] = exp(g_t - g_i) (q_t . k_i), own term included
    C      = (I + G)^-1 - I                                              of the block's own rows

Norms multiply the products of raw keys and queries, which stay exact in bfloat16.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product


@triton.jit
def load_once(
    x,  # [M] pointers
    mask,  # [M] int1
):
    """Return what is at ``x``, ``[M]``, 0 where not ``mask``; read as a tile of equal rows.

    A tile of fewer elements than there are threads the compiler would load anew for every layout it is used in, up to 16 loads
    a thread each.
    """
    ROWS: tl.constexpr = 128 // x.shape[0]
    tile = tl.load(x[None, :] + tl.zeros([ROWS, 1], tl.int32), mask=mask[None, :], other=0)
    return tl.max(tile, 0)


@triton.jit
def load_rows(
    x,  # [N, K] at stride x_n, stride 1 along K
    x_n,
    node,  # [M] int32
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the rows of ``node``, ``[M, BLOCK_K]``, 0 past ``K``; of a slot without a node, whatever ``node`` says there."""
    d = tl.arange(0, BLOCK_K)
    if BLOCK_K == K:
        rows = tl.load(x + node[:, None] * x_n + d[None, :])
    else:
        rows = tl.load(x + node[:, None] * x_n + d[None, :], mask=(d < K)[None, :], other=0.0)
    return rows


@triton.jit
def inverse_norm(
    x,  # [M, BLOCK_K] float
    NORM_EPS: tl.constexpr,  # negative: rows come normalised
):
    """Return ``1 / |x|`` of each row, ``[M]`` float32."""
    scale = tl.full([x.shape[0]], 1.0, tl.float32)
    if NORM_EPS >= 0:
        x = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) + NORM_EPS)
    return scale


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
def products_with_step(
    S,  # [BLOCK_V, STREAM] float
    rows,  # [M] pointers to rows of K elements
    start,
    products,  # [BLOCK_V, M] float32
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STREAM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return ``products`` plus those of one step of the state with the same keys of ``rows``."""
    e = start + tl.arange(0, STREAM)
    if BLOCK_K == K:
        x = tl.load(rows[:, None] + e[None, :])
    else:
        x = tl.load(rows[:, None] + e[None, :], mask=(e < K)[None, :], other=0.0)
    return exact_product(S, tl.trans(x), products, PRECISION)


@triton.jit
def state_products(
    state,  # [K, V] at strides state_k, state_v, of this head
    rows,  # [2 M] pointers to raw keys of M slots, then to their raw queries
    c,  # [BLOCK_V] int32, value columns
    state_k: tl.constexpr,
    state_v: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STREAM: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return ``S^T k`` and ``S^T q`` of all slots, ``[BLOCK_V, M]`` float32 each, the state read once."""
    M: tl.constexpr = rows.shape[0] // 2
    products = tl.zeros([BLOCK_V, 2 * M], tl.float32)
    for start in tl.range(0, BLOCK_K, STREAM, num_stages=STAGES):
        S = state_step(state, c, start, state_k, state_v, K, V, BLOCK_V, BLOCK_K, STREAM)
        products = products_with_step(S, rows, start, products, K, BLOCK_K, STREAM, PRECISION)
    return columns(products, 0, M), columns(products, 1, M)


@triton.jit
def columns(
    x,  # [BLOCK_V, C] float32
    block,
    M: tl.constexpr,
):
    """Return columns ``M block`` to ``M block + M - 1`` of ``x``, ``[BLOCK_V, M]``; they lie in the same threads."""
    BLOCKS: tl.constexpr = x.shape[1] // M
    is_block = (tl.arange(0, BLOCKS) == block)[None, :, None]
    return tl.sum(tl.where(is_block, tl.reshape(x, [x.shape[0], BLOCKS, M]), 0.0), 1)


@triton.jit
def raw_product(
    x,  # [M, BLOCK_K] float
    y,  # [C, BLOCK_K] float
    PRECISION: tl.constexpr,
):
    """Return ``x_t . y_i``, ``[M, C]`` float32."""
    return exact_product(x, tl.trans(y), tl.zeros([x.shape[0], y.shape[0]], tl.float32), PRECISION)


@triton.jit
def inverse_correction(
    G,  # [16, 16] float32, nilpotent
    height,  # int32 scalar, G^height = 0
    PRECISION: tl.constexpr,
):
    """Return ``(I + G)^-1 - I = (I - G)(I + G^2)(I + G^4)... - I``, exact after about log2(height) squarings."""
    C = -G
    power = G
    span = 2
    while span < tl.minimum(height, 16):
        power = exact_product(power, power, tl.zeros([16, 16], tl.float32), PRECISION)
        C = exact_product(C, power, C + power, PRECISION)
        span *= 2
    return C
