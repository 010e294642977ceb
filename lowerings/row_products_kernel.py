"""Products of 64 rows, raw keys of 32 slots and then their queries, made in steps of the key dimension.

A step's operands are read when they are multiplied, so that neither the width of a head nor a type whose products need more
terms decides how many registers a thread holds.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product, terms_in_registers
from treewy_inductor.lowerings.tree_block_kernel import path_decays


@triton.jit
def step_of_rows(
    rows,  # [M] pointers to rows of K elements, stride 1
    start,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Return elements ``start`` to ``start + STREAM - 1`` of the rows, ``[M, STREAM]``, 0 past ``K``."""
    e = start + tl.arange(0, STREAM)
    if BLOCK_K == K:
        x = tl.load(rows[:, None] + e[None, :])
    else:
        x = tl.load(rows[:, None] + e[None, :], mask=(e < K)[None, :], other=0.0)
    return x


@triton.jit
def products_of_rows(
    rows,  # [M] pointers to rows of K elements
    others,  # [C] pointers to rows of K elements
    key_end,  # int32 scalar, BLOCK_K: were it a constant, the compiler would hold the operands of all steps at once
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STREAM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return ``x_t . y_i``, ``[M, C]`` float32."""
    products = tl.zeros([rows.shape[0], others.shape[0]], tl.float32)
    for start in tl.range(0, key_end, STREAM, num_stages=1):
        x = step_of_rows(rows, start, K, BLOCK_K, STREAM)
        y = step_of_rows(others, start, K, BLOCK_K, STREAM)
        products = exact_product(x, tl.trans(y), products, PRECISION)
    return products


@triton.jit
def state_products_of_rows(
    state,  # [K, V] at strides state_k, state_v, of this head
    rows,  # [M] pointers to rows of K elements
    c,  # [BLOCK_V] int32, value columns
    key_end,
    state_k: tl.constexpr,
    state_v: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STREAM: tl.constexpr,
    STAGES: tl.constexpr,
    NORM_EPS: tl.constexpr,  # negative: rows come normalised
    PRECISION: tl.constexpr,
):
    """Return ``S^T x`` of every row, ``[M, BLOCK_V]`` float32, and ``1 / |x|``, ``[M]`` float32."""
    products = tl.zeros([rows.shape[0], BLOCK_V], tl.float32)
    squares = tl.zeros([rows.shape[0]], tl.float32)
    for start in tl.range(0, key_end, STREAM, num_stages=STAGES):
        e = start + tl.arange(0, STREAM)
        if BLOCK_K == K and V % BLOCK_V == 0:
            S = tl.load(state + e[:, None] * state_k + c[None, :] * state_v)
        else:
            in_state = (e < K)[:, None] & (c < V)[None, :]
            S = tl.load(state + e[:, None] * state_k + c[None, :] * state_v, mask=in_state, other=0.0)
        x = step_of_rows(rows, start, K, BLOCK_K, STREAM)
        if S.dtype == tl.bfloat16:
            # A float32 one comes in registers anyhow, since its terms are made there.
            S, _ = terms_in_registers(S, PRECISION)
        products = exact_product(x, S, products, PRECISION)
        if NORM_EPS >= 0:
            squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
    scale = tl.full([rows.shape[0]], 1.0, tl.float32)
    if NORM_EPS >= 0:
        scale = tl.rsqrt(squares + NORM_EPS)
    return products, scale


@triton.jit
def decays_of_any_tree(
    log_decay,  # [N] at stride log_decay_n
    ancestors,  # [N, W] int64
    node,  # [M] int32
    N,
    log_decay_n: tl.constexpr,
    W: tl.constexpr,
):
    """Return ``g_t``, ``[M]`` float32."""
    g = tl.zeros([node.shape[0]], tl.float32)
    # A loop, and of half a word a time, so that what a thread holds of it stays small.
    for w in tl.range(0, 2 * W, num_stages=1):
        above = w * 32 + tl.arange(0, 32)
        log_a = tl.load(log_decay + above * log_decay_n, mask=above < N, other=0.0)
        g += path_decays(tl.load(ancestors + node * W + w // 2) >> (32 * (w % 2)), log_a)
    return g


@triton.jit
def above_block(
    rows,  # [M] pointers to raw keys, then queries
    node,  # [M] int32
    is_live,  # [M] int1
    g,  # [M] float32
    of_raw,  # [M] float32, what multiplies products with each row
    node_i,  # [32] int32, slots of a block
    keys_i,  # [32] pointers to their raw keys
    ancestors,  # [N, W] int64
    path_decay,  # [N, HV] float32, written for these slots
    key_scale,  # [N, HK] float32, written for these slots
    key_end,
    W: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STREAM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return ``of_raw_t exp(g_t - g_i) (x_t . k_i) / |k_i|`` where i is t or above it, else 0: ``[M, 32]`` float32."""
    X = products_of_rows(rows, keys_i, key_end, K, BLOCK_K, STREAM, PRECISION)
    # Half words, of which a thread holds many.
    halves = ancestors.to(tl.pointer_type(tl.int32), bitcast=True)
    word = tl.load(halves + node[:, None] * (2 * W) + node_i[None, :] // 32)
    A = (((word >> (node_i % 32)[None, :]) & 1) != 0) & is_live[:, None]
    D = tl.exp(tl.where(A, g[:, None] - tl.load(path_decay + node_i * HV)[None, :], 0.0))
    return tl.where(A, X * D * of_raw[:, None] * tl.load(key_scale + node_i * HK)[None, :], 0.0)


@triton.jit
def first_rows(
    x,  # [2 M, C]
):
    """Return the first ``M`` rows of ``x``, ``[M, C]``."""
    first, _ = tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), [1, 2, 0]))
    return first


@triton.jit
def solve_rows(
    X,  # [64, 32] float32: L in the upper half, nilpotent, and any rows in the lower one
    height,  # int32 scalar, L^height = 0
    PRECISION: tl.constexpr,
):
    """Return ``X (I - L)^-1 = X (I + L)(I + L^2)(I + L^4)...``, exact after about log2(height) products."""
    power = first_rows(X)
    span = 1
    while span < tl.minimum(height, 32):
        X = exact_product(X, power, X, PRECISION)
        power = exact_product(power, power, tl.zeros([32, 32], tl.float32), PRECISION)
        span *= 2
    return X
