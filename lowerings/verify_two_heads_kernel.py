"""The verify kernel's way for at most 16 nodes of two value heads of one key head: verify_one_block_kernel.py's formula, twice.

Keys, queries, their products and ancestors are made once for both heads. The states of both come as one sequence of half tiles,
so that the next halves are on their way while a tile is finished. Faster than a program a head where there are programs enough.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product, product_of_terms, terms_in_registers
from treewy_inductor.lowerings.fetch_ahead_kernel import fetch_into_l2
from treewy_inductor.lowerings.half_tile_kernel import (
    add_scaled_values,
    inverse_norm_of_halves,
    load_half_rows,
    load_values,
    raw_product_of_halves,
)
from treewy_inductor.lowerings.tree_block_kernel import columns, first_half, is_above, solve, state_step


@triton.jit
def operators_of_heads(
    raw,  # [16, 32] float32, raw keys times raw keys, then raw queries
    A,  # [16, 32] int1, ancestor i of t or i = t
    is_other,  # [16, 32] int1, slot i is not t's own
    is_live,  # [32] int1
    is_key,  # [32] int1
    x_scale,  # [32] float32
    log_a,  # [2, 16] float32
    b,  # [2, 32] float32
    SCALE: tl.constexpr,
):
    """Return of each head ``[L | P]``, what multiplies products with the state, beta of live nodes, and path decays."""
    # Chosen, not multiplied, here and below: an inert node may hold NaN.
    g = tl.sum(tl.where(A[None, :, :], log_a[:, :, None], 0.0), 1)
    b = tl.where(is_live[None, :], b, 0.0)
    of_raw = x_scale[None, :] * tl.where(is_key[None, :], -b, SCALE)
    D = tl.exp(tl.where(A[None, :, :], g[:, None, :] - columns(g, 0)[:, :, None], 0.0))
    raw *= first_half(x_scale)[:, None]
    X = tl.where((A & is_other)[None, :, :], raw[None, :, :] * D * of_raw[:, None, :], 0.0)
    return X, tl.where(is_live[None, :], tl.exp(g) * of_raw, 0.0), b, g


@triton.jit
def verify_two_heads(
    query,  # [N, K] at stride query_n, of this row and key head, as is the next
    key,
    value,  # [N, V] at stride value_n, of this row and first value head, as are the next three
    log_decay,
    beta,
    state,
    ancestors,  # [N] int64, of this row
    height,
    output,  # [N, HV, V] from the first head on, as is the next
    pseudo_values,
    path_decay,  # [N, HV], of this row and first value head
    key_scale,  # [N, HK], of this row and key head
    N,
    ih,  # the first value head
    part_0,
    value_h,
    log_decay_h,
    beta_h,
    state_h,
    query_n: tl.constexpr,
    key_n: tl.constexpr,
    value_n: tl.constexpr,
    log_decay_n: tl.constexpr,
    beta_n: tl.constexpr,
    state_k: tl.constexpr,
    state_v: tl.constexpr,
    SCALE: tl.constexpr,
    NORM_EPS: tl.constexpr,
    HK: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    IS_FETCHED: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
    VALUE_TERMS: tl.constexpr,
    VALUE_PRECISION: tl.constexpr,
):
    """Write what the kernel writes, for two value heads and PARTS tiles of the value columns of each."""
    HV: tl.constexpr = HK * GROUPS
    slot = tl.arange(0, 16)
    node = tl.minimum(slot, N - 1)
    t = tl.arange(0, 32)
    is_key = t < 16
    node_t = tl.minimum(t % 16, N - 1)
    in_row = t % 16 < N
    head = tl.arange(0, 2)
    # All loads of what is small come before all products: one wait for memory, not one a step.
    word = tl.load(ancestors + node_t, mask=in_row, other=0)
    of_heads = beta + head[:, None] * beta_h + (node_t * beta_n)[None, :]
    b = tl.load(of_heads, mask=(in_row & is_key)[None, :], other=0.0).to(tl.float32)
    of_heads = log_decay + head[:, None] * log_decay_h + (node * log_decay_n)[None, :]
    log_a = tl.load(of_heads, mask=(slot < N)[None, :], other=0.0).to(tl.float32)
    is_live_i = is_above(tl.load(ancestors + node, mask=slot < N, other=0), slot)
    rows = tl.where(is_key, key + node_t * key_n, query + node_t * query_n)
    x0 = load_half_rows(rows, 0, K, BLOCK_K)
    x1 = load_half_rows(rows, 1, K, BLOCK_K)
    k0 = load_half_rows(key + node * key_n, 0, K, BLOCK_K)
    k1 = load_half_rows(key + node * key_n, 1, K, BLOCK_K)
    # The first tile alone: asking for more of the state so soon makes what a program needs first wait.
    if IS_FETCHED:
        fetch_into_l2(state + part_0 * BLOCK_V * state_v, path_decay, BLOCK_V * K)
    # An inert node is nobody's ancestor, not even its own.
    is_live = is_above(word, t % 16)
    A = is_above(word[None, :], slot[:, None])
    # No slot is t for queries: their own term stays.
    is_other = slot[:, None] != t[None, :]
    # Zeros where it may hold NaN, so that products with the state need no choice.
    x0 = tl.where(is_live[:, None], x0, 0.0)
    x1 = tl.where(is_live[:, None], x1, 0.0)
    x_scale = inverse_norm_of_halves(x0, x1, NORM_EPS)
    raw = raw_product_of_halves(k0, k1, x0, x1, PRECISION)
    # Of both heads at once: a step waits as long for two small products as for one.
    X, of_xS, b, g = operators_of_heads(raw, A, is_other, is_live, is_key, x_scale, log_a, b, SCALE)
    if part_0 == 0:
        tl.store(path_decay + head[:, None] + (node_t * HV)[None, :], g, mask=(in_row & is_key)[None, :])
        if ih % GROUPS == 0:
            tl.store(key_scale + node_t * HK, tl.where(is_live, x_scale, 0.0), mask=in_row & is_key)
    X0, X1 = tl.split(tl.permute(solve(X, height, SOLVE_PRECISION), [1, 2, 0]))
    of0, of1 = tl.split(tl.permute(of_xS, [1, 0]))
    b0, b1 = tl.split(tl.permute(b, [1, 0]))

    xS = tl.zeros([BLOCK_V, 32], tl.float32)
    for step in tl.range(0, 4 * PARTS, num_stages=STAGES):
        h = step // (2 * PARTS)
        c = (part_0 + step // 2 % PARTS) * BLOCK_V + tl.arange(0, BLOCK_V)
        half = step % 2
        start = half * (BLOCK_K // 2)
        S = state_step(state + h * state_h, c, start, state_k, state_v, K, V, BLOCK_V, BLOCK_K, BLOCK_K // 2)
        # Asked for as a tile's second half is, and outside the branch, so that no step waits for what it has just asked for.
        v = load_values(value + h * value_h + node * value_n, c, is_live_i & (slot >= 16 * (1 - half)), V)
        # Here and not in each branch, where it would cost registers: 26 a thread. Of any type, so that products read it from
        # registers: where both branches address it in shared memory, ptxas 12.8 computes that address in one of them only.
        hi, lo = terms_in_registers(S, PRECISION)
        if half == 0:
            xS = product_of_terms(hi, lo, S.dtype, tl.trans(x0), tl.zeros([BLOCK_V, 32], tl.float32), PRECISION)
        else:
            xS = product_of_terms(hi, lo, S.dtype, tl.trans(x1), xS, PRECISION)
            R = tl.where(h == 0, of0, of1)[None, :] * xS
            R = add_scaled_values(R, v, tl.where(h == 0, b0, b1), VALUE_TERMS, VALUE_PRECISION)
            R = exact_product(columns(R, 0), tl.where(h == 0, X0, X1), R, SOLVE_PRECISION)
            out = node[None, :] * (HV * V) + h * V + c[:, None]
            tile = (c < V)[:, None] & (slot < N)[None, :]
            tl.store(pseudo_values + out, columns(R, 0), mask=tile)
            tl.store(output + out, columns(R, 1).to(output.dtype.element_ty), mask=tile)
