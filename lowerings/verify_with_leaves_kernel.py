"""The verify kernel's way for 17 to 64 nodes of which at most 16 are internal: one block to solve, the rest leaves.

    block      X = (I - L)^-1 [L | P],  L = -G        [U | O] = [R | exp(g) S^T q] + R X
    leaves     Y = (I - L)^-1 [-G_l | P_l]            [U_l | O_l] = [R_l | exp(g) S^T q_l] + R Y,  O_l += (q_l . k_l) U_l

Slots are positions in ``order``: the first 16 hold all internal nodes, and nobody descends from what is in a later slot. All is
made transposed, ancestor i along the first axis and node t along the second, as the products read it. The state comes in tiles
of BLOCK_V value columns with all their keys, each split once and multiplied with the rows of both blocks.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product
from treewy_inductor.lowerings.fetch_ahead_kernel import fetch_into_l2
from treewy_inductor.lowerings.half_tile_kernel import (
    add_scaled_values,
    half_tile,
    inverse_norm_of_halves,
    load_half_rows,
    raw_product_of_halves,
)
from treewy_inductor.lowerings.tree_block_kernel import columns, first_half, is_above, solve
from treewy_inductor.lowerings.trunk_kernel import add_trunk_to_tile


@triton.jit
def verify_with_leaves(
    query,  # [N, K] at stride query_n, of this row and key head, as is the next
    key,
    value,  # [N, V] at stride value_n, of this row and value head, as are the next three
    log_decay,
    beta,
    state,
    ancestors,  # [N] int64, of this row
    order,  # [N] int32, of this row
    height,
    trunk_keys,
    trunk_scale,
    trunk_values,
    trunk_decay,
    trunk_length,
    output,  # [N, HV, V] from this head on, as is the next
    pseudo_values,
    path_decay,  # [N, HV], of this row and value head
    key_scale,  # [N, HK], of this row and key head
    N,
    ib,
    ih,
    part_0,
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
    T: tl.constexpr,
    LEAVES: tl.constexpr,  # slots after the first 16, a power of two
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
    """Write what the kernel writes, for one value head and PARTS tiles of its value columns."""
    HV: tl.constexpr = HK * GROUPS
    i = tl.arange(0, 16)
    node = tl.load(order + i)
    t = tl.arange(0, 32)
    is_key = t < 16
    node_t = tl.load(order + t % 16)
    leaf = 16 + tl.arange(0, LEAVES)
    in_row = leaf < N
    node_l = tl.load(order + leaf, mask=in_row, other=0)
    # All loads of what is small come before all products: one wait for memory, not one a step.
    word = tl.load(ancestors + node_t)
    word_l = tl.load(ancestors + node_l, mask=in_row, other=0)
    b = tl.load(beta + node_t * beta_n, mask=is_key, other=0.0).to(tl.float32)
    b_l = tl.load(beta + node_l * beta_n).to(tl.float32)
    log_a = tl.load(log_decay + node * log_decay_n).to(tl.float32)
    log_a_l = tl.load(log_decay + node_l * log_decay_n).to(tl.float32)
    is_live_i = is_above(tl.load(ancestors + node), node)
    x0 = load_half_rows(tl.where(is_key, key + node_t * key_n, query + node_t * query_n), 0, K, BLOCK_K)
    x1 = load_half_rows(tl.where(is_key, key + node_t * key_n, query + node_t * query_n), 1, K, BLOCK_K)
    k0 = load_half_rows(key + node * key_n, 0, K, BLOCK_K)
    k1 = load_half_rows(key + node * key_n, 1, K, BLOCK_K)
    k_l0 = load_half_rows(key + node_l * key_n, 0, K, BLOCK_K)
    k_l1 = load_half_rows(key + node_l * key_n, 1, K, BLOCK_K)
    q_l0 = load_half_rows(query + node_l * query_n, 0, K, BLOCK_K)
    q_l1 = load_half_rows(query + node_l * query_n, 1, K, BLOCK_K)
    if IS_FETCHED:
        fetch_into_l2(state + part_0 * BLOCK_V * state_v, path_decay, BLOCK_V * K)
    # An inert node is nobody's ancestor, not even its own.
    is_live = is_above(word, node_t)
    is_live_l = is_above(word_l, node_l)
    A = is_above(word[None, :], node[:, None])
    A_l = is_above(word_l[None, :], node[:, None])
    x_scale = inverse_norm_of_halves(x0, x1, NORM_EPS)
    k_scale = first_half(x_scale)
    k_scale_l = inverse_norm_of_halves(k_l0, k_l1, NORM_EPS)
    q_scale_l = inverse_norm_of_halves(q_l0, q_l1, NORM_EPS) * SCALE
    own = k_l0.to(tl.float32) * q_l0.to(tl.float32) + k_l1.to(tl.float32) * q_l1.to(tl.float32)
    own = tl.where(is_live_l, tl.sum(own, 1) * k_scale_l * q_scale_l, 0.0)
    # Chosen, not multiplied, here and below: an inert node may hold NaN.
    g = tl.sum(tl.where(A, log_a[:, None], 0.0), 0)
    g_l = tl.sum(tl.where(A_l, log_a[:, None], 0.0), 0) + tl.where(is_live_l, log_a_l, 0.0)
    b = tl.where(is_live, b, 0.0)
    b_l = tl.where(is_live_l, b_l, 0.0)
    of_raw = x_scale * tl.where(is_key, -b, SCALE)
    D = tl.exp(tl.where(A, g[None, :] - first_half(g)[:, None], 0.0)) * k_scale[:, None]
    # No slot is t for queries: their own term stays.
    X = tl.where(A & (i[:, None] != t[None, :]), raw_product_of_halves(k0, k1, x0, x1, PRECISION) * D * of_raw[None, :], 0.0)
    X = solve(X, height, SOLVE_PRECISION)
    D = tl.exp(tl.where(A_l, g_l[None, :] - first_half(g)[:, None], 0.0)) * k_scale[:, None]
    C = columns(X, 0)
    G_l = tl.where(A_l, raw_product_of_halves(k0, k1, k_l0, k_l1, PRECISION) * D * (-b_l * k_scale_l)[None, :], 0.0)
    G_l = exact_product(C, G_l, G_l, SOLVE_PRECISION)
    P_l = tl.where(A_l, raw_product_of_halves(k0, k1, q_l0, q_l1, PRECISION) * D * q_scale_l[None, :], 0.0)
    P_l = exact_product(C, P_l, P_l, SOLVE_PRECISION)
    of_xS = tl.where(is_live, tl.exp(g) * of_raw, 0.0)
    of_kS = tl.where(is_live_l, -tl.exp(g_l) * b_l * k_scale_l, 0.0)
    of_qS = tl.where(is_live_l, tl.exp(g_l) * q_scale_l, 0.0)
    if part_0 == 0:
        tl.store(path_decay + node_t * HV, g, mask=is_key)
        tl.store(path_decay + node_l * HV, g_l, mask=in_row)
        if ih % GROUPS == 0:
            tl.store(key_scale + node_t * HK, tl.where(is_live, x_scale, 0.0), mask=is_key)
            tl.store(key_scale + node_l * HK, tl.where(is_live_l, k_scale_l, 0.0), mask=in_row)
    if IS_FETCHED and PARTS > 1:
        fetch_into_l2(state + (part_0 + 1) * BLOCK_V * state_v, path_decay, BLOCK_V * K)

    for part in tl.range(0, PARTS, num_stages=STAGES):
        c = (part_0 + part) * BLOCK_V + tl.arange(0, BLOCK_V)
        S = half_tile(state, c, 0, state_k, state_v, K, V, BLOCK_V, BLOCK_K)
        # Chosen after the load: a masked one would take two buffers of shared memory, which is what bounds programs here.
        v = tl.load(value + node[:, None] * value_n + c[None, :], mask=(c < V)[None, :], other=0.0)
        v = tl.where(is_live_i[:, None], v, 0.0).to(value.dtype.element_ty)
        v_l = tl.load(value + node_l[:, None] * value_n + c[None, :], mask=(c < V)[None, :], other=0.0)
        v_l = tl.where(is_live_l[:, None], v_l, 0.0).to(value.dtype.element_ty)
        xS = exact_product(S, tl.trans(x0), tl.zeros([BLOCK_V, 32], tl.float32), PRECISION)
        kS = exact_product(S, tl.trans(k_l0), tl.zeros([BLOCK_V, LEAVES], tl.float32), PRECISION)
        qS = exact_product(S, tl.trans(q_l0), tl.zeros([BLOCK_V, LEAVES], tl.float32), PRECISION)
        S = half_tile(state, c, 1, state_k, state_v, K, V, BLOCK_V, BLOCK_K)
        xS = exact_product(S, tl.trans(x1), xS, PRECISION)
        kS = exact_product(S, tl.trans(k_l1), kS, PRECISION)
        qS = exact_product(S, tl.trans(q_l1), qS, PRECISION)
        if T > 0:
            xS = add_trunk_to_tile(
                *(xS, x0, x1, trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length, ib, ih, c),
                *(T, HK, GROUPS, K, V, BLOCK_K, PRECISION, SOLVE_PRECISION),
            )
            kS = add_trunk_to_tile(
                *(kS, k_l0, k_l1, trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length, ib, ih, c),
                *(T, HK, GROUPS, K, V, BLOCK_K, PRECISION, SOLVE_PRECISION),
            )
            qS = add_trunk_to_tile(
                *(qS, q_l0, q_l1, trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length, ib, ih, c),
                *(T, HK, GROUPS, K, V, BLOCK_K, PRECISION, SOLVE_PRECISION),
            )
        R = tl.where((of_xS != 0.0)[None, :], of_xS[None, :] * xS, 0.0)
        R = add_scaled_values(R, v, b, VALUE_TERMS, VALUE_PRECISION)
        r = columns(R, 0)
        R = exact_product(r, X, R, SOLVE_PRECISION)
        U_l = tl.where((of_kS != 0.0)[None, :], of_kS[None, :] * kS, 0.0)
        U_l = add_scaled_values(U_l, v_l, b_l, VALUE_TERMS, VALUE_PRECISION)
        U_l = exact_product(r, G_l, U_l, SOLVE_PRECISION)
        O_l = tl.where((of_qS != 0.0)[None, :], of_qS[None, :] * qS, 0.0)
        O_l = exact_product(r, P_l, O_l, SOLVE_PRECISION) + own[None, :] * U_l
        out = node[None, :] * (HV * V) + c[:, None]
        tile = (c < V)[:, None]
        tl.store(pseudo_values + out, columns(R, 0), mask=tile)
        tl.store(output + out, columns(R, 1).to(output.dtype.element_ty), mask=tile)
        # In halves, so that what rearranges them for the stores is half as large.
        for half in tl.static_range(2):
            in_half = half * (LEAVES // 2) + tl.arange(0, LEAVES // 2)
            node_h = tl.load(order + 16 + in_half, mask=16 + in_half < N, other=0)
            out = node_h[None, :] * (HV * V) + c[:, None]
            tile = (c < V)[:, None] & (16 + in_half < N)[None, :]
            tl.store(pseudo_values + out, columns(U_l, half), mask=tile)
            tl.store(output + out, columns(O_l, half).to(output.dtype.element_ty), mask=tile)
