"""What one block of 16 slots needs and does in the verify kernel; a slot is a position in ``order``, i above and t below.

    GT[i,t] = beta_t exp(g_t - g_i) (k_i . k_t), strict ancestors        PT[i,t] = exp(g_t - g_i) (q_t . k_i), own term included

Both stand transposed, since value columns are the rows of every product: ``R -= U GT`` and ``O += U PT``. Norms multiply
the products of raw keys and queries, which stay exact in bfloat16.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product


@triton.jit
def path_decays(
    log_decay,  # [N] at stride log_decay_n, of this row and head
    log_decay_n,
    ancestors,  # [N, W] int64, of this row
    node,  # [16] int32
    N,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,  # nodes a word, 16 if N <= 16
):
    """Return ``g_t``, the sum of log decays over node t and its ancestors, ``[16]`` float32."""
    g = tl.zeros([16], tl.float32)
    for w in tl.static_range(W):
        bit = tl.arange(0, COLUMNS)
        above = w * 64 + bit
        log_a = tl.load(log_decay + above * log_decay_n, mask=above < N, other=0.0).to(tl.float32)
        word = tl.load(ancestors + node * W + w)
        A = ((word[:, None] >> bit.to(tl.int64)[None, :]) & 1) != 0
        g += tl.sum(tl.where(A, log_a[None, :], 0.0), 1)
    return g


@triton.jit
def block_nodes(
    order,  # [N] int32, of this row
    ancestors,  # [N, W] int64, of this row
    start,
    N,
    W: tl.constexpr,
):
    """Return the 16 nodes at slots from ``start`` on, 0 past the last slot, and which of them are live."""
    slot = start + tl.arange(0, 16)
    node = tl.load(order + slot, mask=slot < N, other=0)
    own_word = tl.load(ancestors + node * W + node // 64)
    is_live = (((own_word >> (node % 64).to(tl.int64)) & 1) != 0) & (slot < N)
    return node, is_live


@triton.jit
def inverse_norm(
    x,  # [16, BLOCK_K] float
    NORM_EPS: tl.constexpr,  # negative: rows come normalised
):
    """Return ``1 / |x|`` of each row, ``[16]`` float32."""
    scale = tl.full([16], 1.0, tl.float32)
    if NORM_EPS >= 0:
        x = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) + NORM_EPS)
    return scale


@triton.jit
def read_block(
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
    start,
    N,
    SCALE: tl.constexpr,
    NORM_EPS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return node, is_live, k and q ``[16, BLOCK_K]`` raw, ``1/|k|``, ``scale/|q|``, beta and g of slots from ``start`` on."""
    node, is_live = block_nodes(order, ancestors, start, N, W)
    d = tl.arange(0, BLOCK_K)
    tile = (start + tl.arange(0, 16) < N)[:, None] & (d < K)[None, :]
    k = tl.load(key + node[:, None] * key_n + d[None, :], mask=tile, other=0.0)
    q = tl.load(query + node[:, None] * query_n + d[None, :], mask=tile, other=0.0)
    b = tl.load(beta + node * beta_n).to(tl.float32)
    g = path_decays(log_decay, log_decay_n, ancestors, node, N, W, COLUMNS)
    return node, is_live, k, q, inverse_norm(k, NORM_EPS), inverse_norm(q, NORM_EPS) * SCALE, b, g


@triton.jit
def block_products(
    query,  # [N, K] at stride query_n, of this row and head, raw, as is key
    query_n,
    key,
    key_n,
    ancestors,  # [N, W] int64, of this row
    node_i,  # [16] int32
    is_live_i,  # [16] int1
    k_scale_i,  # [16] float32
    g_i,  # [16] float32
    node,  # [16] int32
    is_live,  # [16] int1
    b_scale,  # [16] float32, beta / |k|
    q_scale,  # [16] float32
    g,  # [16] float32
    IS_OWN: tl.constexpr,  # both blocks are one
    K: tl.constexpr,
    CHUNK: tl.constexpr,  # of the key dimension, power of two
    W: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return ``GT`` and ``PT`` from the block of ``node_i`` to that of ``node``, ``[16, 16]`` float32 each.

    Keys and queries are read here, from cache, and in chunks: kept by the caller they would fill its registers.
    """
    KK = tl.zeros([16, 16], tl.float32)
    KQ = tl.zeros([16, 16], tl.float32)
    for start in tl.range(0, K, CHUNK, num_stages=1):
        d = start + tl.arange(0, CHUNK)
        in_k = (d < K)[None, :]
        k_i = tl.load(key + node_i[:, None] * key_n + d[None, :], mask=in_k, other=0.0)
        k = tl.load(key + node[:, None] * key_n + d[None, :], mask=in_k, other=0.0)
        q = tl.load(query + node[:, None] * query_n + d[None, :], mask=in_k, other=0.0)
        KK = exact_product(k_i, tl.trans(k), KK, PRECISION)
        KQ = exact_product(k_i, tl.trans(q), KQ, PRECISION)
    word = tl.load(ancestors + node[None, :] * W + node_i[:, None] // 64)
    A = (((word >> (node_i % 64).to(tl.int64)[:, None]) & 1) != 0) & is_live_i[:, None] & is_live[None, :]
    D = tl.exp(tl.where(A, g[None, :] - g_i[:, None], 0.0)) * k_scale_i[:, None]
    i = tl.arange(0, 16)
    is_strict = A & (i[:, None] != i[None, :]) if IS_OWN else A
    # Chosen, not multiplied: an inert node may hold NaN.
    GT = tl.where(is_strict, KK * D * b_scale[None, :], 0.0)
    PT = tl.where(A, KQ * D * q_scale[None, :], 0.0)
    return GT, PT


@triton.jit
def solve_block(
    R,  # [BLOCK_V, 16] float32
    GT,  # [16, 16] float32, strictly upper triangular
    height,  # int32 scalar, GT^height = 0
    PRECISION: tl.constexpr,
):
    """Return ``U = R (I + GT)^-1 = R (I - GT)(I + GT^2)(I + GT^4)...``, exact after about log2(height) squarings."""
    U = exact_product(R, -GT, R, PRECISION)
    power = GT
    span = 2
    while span < tl.minimum(height, 16):
        power = exact_product(power, power, tl.zeros([16, 16], tl.float32), PRECISION)
        U = exact_product(U, power, U, PRECISION)
        span *= 2
    return U
