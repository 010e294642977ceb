"""What a block of 16 slots does to the slots of a verify program: i in the block, t any slot, i above t in the tree.

    G[t,i] = beta_t exp(g_t - g_i) (k_t . k_i), strict ancestors        P[t,i] = exp(g_t - g_i) (q_t . k_i), own term included
    C      = (I + G)^-1 - I                                              of the block's own rows

Norms multiply the products of raw keys and queries, which stay exact in bfloat16.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product


@triton.jit
def load_rows(
    x,  # [N, K] at stride x_n, stride 1 along K
    x_n,
    node,  # [M] int32
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the rows of ``node``, ``[M, BLOCK_K]``, 0 past ``K``."""
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
def path_decays(
    log_decay,  # [N] at stride log_decay_n, of this row and head
    log_decay_n,
    ancestors,  # [N, W] int64, of this row
    node,  # [M] int32
    N,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,  # nodes looked at together: 16 if N <= 16, else 32
):
    """Return ``g_t``, the sum of log decays over node t and its ancestors, ``[M]`` float32."""
    g = tl.zeros([node.shape[0]], tl.float32)
    bit = tl.arange(0, COLUMNS)
    for part in tl.static_range(1 if COLUMNS < 32 else 2 * W):
        above = part * 32 + bit
        log_a = tl.load(log_decay + above * log_decay_n, mask=above < N, other=0.0).to(tl.float32)
        word = (tl.load(ancestors + node * W + part // 2) >> (part % 2 * 32)).to(tl.int32)
        g += tl.sum(tl.where((word[:, None] & (1 << bit)[None, :]) != 0, log_a[None, :], 0.0), 1)
    return g


@triton.jit
def is_live_node(
    ancestors,  # [N, W] int64, of this row
    node,  # [M] int32
    W: tl.constexpr,
):
    """Return which nodes are not inert, ``[M]`` int1: those that are their own ancestors."""
    word = tl.load(ancestors + node * W + node // 64)
    return ((word >> (node % 64).to(tl.int64)) & 1) != 0


@triton.jit
def decays_between(
    ancestors,  # [N, W] int64, of this row
    node,  # [M] int32
    is_live,  # [M] int1
    g,  # [M] float32
    node_i,  # [16] int32
    is_live_i,  # [16] int1
    g_i,  # [16] float32
    W: tl.constexpr,
):
    """Return whether i is t or above it, ``[M, 16]``, and ``exp(g_t - g_i)`` where it is, 1 elsewhere."""
    word = tl.load(ancestors + node[:, None] * W + (node_i[None, :] // 64 if W > 1 else 0))
    A = (((word >> (node_i % 64).to(tl.int64)[None, :]) & 1) != 0) & is_live[:, None] & is_live_i[None, :]
    return A, tl.exp(tl.where(A, g[:, None] - g_i[None, :], 0.0))


@triton.jit
def raw_product(
    x,  # [M, BLOCK_K] float
    k_i,  # [16, BLOCK_K] float
    PRECISION: tl.constexpr,
):
    """Return ``x_t . k_i``, ``[M, 16]`` float32."""
    return exact_product(x, tl.trans(k_i), tl.zeros([x.shape[0], 16], tl.float32), PRECISION)


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


@triton.jit
def block_operators(
    query,  # [N, K] at stride query_n, of this row and head, as are the next three
    query_n,
    key,
    key_n,
    log_decay,
    log_decay_n,
    beta,
    beta_n,
    ancestors,  # [N, W] int64, of this row
    order,  # [N] int32, of this row
    block,
    N,
    height,
    k,  # [SLOTS, BLOCK_K] float, raw
    q,  # [SLOTS, BLOCK_K] float, raw
    node,  # [SLOTS] int32
    is_live,  # [SLOTS] int1
    b_scale,  # [SLOTS] float32, beta / |k|
    q_scale,  # [SLOTS] float32
    g,  # [SLOTS] float32
    NORM_EPS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    """Return ``-G`` and ``P`` from the internal slots of ``block`` to all, ``[SLOTS, 16]``, and ``C``, ``[16, 16]``."""
    slot_i = block * 16 + tl.arange(0, 16)
    node_i = tl.load(order + slot_i, mask=slot_i < N, other=0)
    k_i = load_rows(key, key_n, node_i, K, BLOCK_K)
    b_i = tl.load(beta + node_i * beta_n).to(tl.float32)
    is_live_i = is_live_node(ancestors, node_i, W) & (slot_i < N)
    g_i = path_decays(log_decay, log_decay_n, ancestors, node_i, N, W, COLUMNS)
    k_scale_i = inverse_norm(k_i, NORM_EPS)
    A, D = decays_between(ancestors, node_i, is_live_i, g_i, node_i, is_live_i, g_i, W)
    # Chosen, not multiplied, here and below: an inert node may hold NaN.
    D *= (b_i * k_scale_i)[:, None] * k_scale_i[None, :]
    G = tl.where(A & (node_i[:, None] != node_i[None, :]), raw_product(k_i, k_i, PRECISION) * D, 0.0)
    C = inverse_correction(G, height, SOLVE_PRECISION)
    A, D = decays_between(ancestors, node, is_live, g, node_i, is_live_i, g_i, W)
    D *= k_scale_i[None, :]
    is_strict = A & (node[:, None] != node_i[None, :])
    G = tl.where(is_strict, raw_product(k, k_i, PRECISION) * D * -b_scale[:, None], 0.0)
    P = tl.where(A, raw_product(q, k_i, PRECISION) * D * q_scale[:, None], 0.0)
    return G, P, C


@triton.jit
def slots_of_block(
    R,  # [BLOCK_V, SLOTS] float32
    block,
):
    """Return columns ``16 block`` to ``16 block + 15`` of ``R``, ``[BLOCK_V, 16]``."""
    BLOCKS: tl.constexpr = R.shape[1] // 16
    is_block = (tl.arange(0, BLOCKS) == block)[None, :, None]
    return tl.sum(tl.where(is_block, tl.reshape(R, [R.shape[0], BLOCKS, 16]), 0.0), 1)
