"""Verify a tree of at most 16 nodes against the state above its root, which is written meanwhile: one read, one write of it.

    S = exp(G) S_0 + sum over the trunk of exp(G - g_j) k_j u_j^T        stored where S_0 was
    [U | O] = [R | exp(g) S^T q] + R X                                   block_operators_kernel.py says what X and R are

The trunk is what was accepted last, at most 16 tokens. One program owns one (batch row, value head) and PARTS tiles of BLOCK_V
value columns, of which nobody else reads a cell. A half tile is read into the matrix unit's registers, folded, stored from them
and goes on in them, as it was stored, to meet keys and queries; the next one is on its way meanwhile.

Bytes: 8 K V for the state, 4 K N + 8 V N for the nodes, 2 K + 4 V a token of the trunk. FLOPs: 8 K V N of state products,
64 K V of the fold. Measured at 1.38 times a copy of the states (15 nodes, 128 rows, H200), at 70% of the memory's rate and
70% of a program's life spent waiting for it: bench/NOTES.md.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.block_operators_kernel import operators_of_block, store_results
from treewy_inductor.lowerings.exact_product_kernel import exact_product
from treewy_inductor.lowerings.fetch_ahead_kernel import fetch_into_l2
from treewy_inductor.lowerings.fold_into_tile_kernel import fold_into_tile, load_path_keys, load_path_values, read_tile
from treewy_inductor.lowerings.half_tile_kernel import (
    inverse_norm_of_halves,
    load_half_rows,
    load_values,
)
from treewy_inductor.lowerings.register_tile_kernel import keys_of_matrix
from treewy_inductor.lowerings.tree_block_kernel import is_above, solve
from treewy_inductor.lowerings.trunk_kernel import load_trunk_weights


@triton.jit
def tree_gated_delta_fused_kernel(
    query,  # [B, N, HK, K] float, stride 1 along K
    key,  # [B, N, HK, K] float, stride 1 along K
    value,  # [B, N, HV, V] float, stride 1 along V
    log_decay,  # [B, N, HV] float
    beta,  # [B, N, HV] float
    state,  # [B, HV, K, V] float, any strides, overwritten
    ancestors,  # [B, N, 1] int64, contiguous
    height,  # [B] int32
    trunk_keys,  # [B, T, HK, K] float, contiguous, as are the next four
    trunk_scale,  # [B, T, HK] float32
    trunk_values,  # [B, T, HV, V] float32
    trunk_decay,  # [B, T, HV] float32
    trunk_length,  # [B] int32
    output,  # [B, N, HV, V] float out, contiguous
    pseudo_values,  # [B, N, HV, V] float32 out, contiguous
    path_decay,  # [B, N, HV] float32 out, contiguous
    key_scale,  # [B, N, HK] float32 out, contiguous
    query_b,
    query_h,
    key_b,
    key_h,
    value_b,
    value_h,
    log_decay_b,
    log_decay_h,
    beta_b,
    beta_h,
    state_b,
    state_h,
    N,
    query_n: tl.constexpr,
    key_n: tl.constexpr,
    value_n: tl.constexpr,
    log_decay_n: tl.constexpr,
    beta_n: tl.constexpr,
    state_k: tl.constexpr,
    state_v: tl.constexpr,
    SCALE: tl.constexpr,
    NORM_EPS: tl.constexpr,  # negative: query and key come normalised
    HK: tl.constexpr,
    GROUPS: tl.constexpr,  # value heads a key head
    K: tl.constexpr,
    V: tl.constexpr,
    T: tl.constexpr,  # slots of the trunk, at most 16
    PARTS: tl.constexpr,  # tiles a program, divides their number
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K
    IS_FETCHED: tl.constexpr,  # the program's part of the state, contiguous, is asked for at its start
    PRECISION: tl.constexpr,  # of products with raw queries and keys
    SOLVE_PRECISION: tl.constexpr,  # of products of float32 with float32
    VALUE_TERMS: tl.constexpr,  # bfloat16 ones that beta is the sum of, if values are bfloat16; else 0
    VALUE_PRECISION: tl.constexpr,  # else of products with values
):
    PROGRAMS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V // PARTS
    HV: tl.constexpr = HK * GROUPS
    KEYS: tl.constexpr = BLOCK_K // 2
    BITS: tl.constexpr = state.dtype.element_ty.primitive_bitwidth
    PER: tl.constexpr = min(128 // BITS, KEYS // 4)
    IS_WHOLE: tl.constexpr = BLOCK_K == K and V % BLOCK_V == 0
    pid = tl.program_id(0)
    part_0 = pid % PROGRAMS * PARTS
    ih = pid // PROGRAMS % HV
    ib = (pid // (PROGRAMS * HV)).to(tl.int64)
    ik = ih // GROUPS
    state += ib * state_b + ih * state_h
    ancestors += ib * N
    query += ib * query_b + ik * query_h
    key += ib * key_b + ik * key_h
    value += ib * value_b + ih * value_h
    log_decay += ib * log_decay_b + ih * log_decay_h
    beta += ib * beta_b + ih * beta_h
    output += (ib * N * HV + ih) * V
    pseudo_values += (ib * N * HV + ih) * V
    path_decay += ib * N * HV + ih
    key_scale += ib * N * HK + ik
    slot = tl.arange(0, 16)
    node = tl.minimum(slot, N - 1)
    t = tl.arange(0, 32)
    is_key = t < 16
    node_t = tl.minimum(t % 16, N - 1)
    in_row = t % 16 < N
    r = tl.arange(0, BLOCK_V)
    c_0 = part_0 * BLOCK_V
    state += c_0 * state_v
    # All loads of what is small come before all products, and the state's first half tile with them: one wait for memory.
    length = tl.load(trunk_length + ib)
    height = tl.load(height + ib)
    word = tl.load(ancestors + node_t, mask=in_row, other=0)
    b = tl.load(beta + node_t * beta_n, mask=in_row & is_key, other=0.0).to(tl.float32)
    log_a = tl.load(log_decay + node * log_decay_n, mask=slot < N, other=0.0).to(tl.float32)
    is_live_i = is_above(tl.load(ancestors + node, mask=slot < N, other=0), slot)
    rows = tl.where(is_key, key + node_t * key_n, query + node_t * query_n)
    x0 = load_half_rows(rows, 0, K, BLOCK_K)
    x1 = load_half_rows(rows, 1, K, BLOCK_K)
    k0 = load_half_rows(key + node * key_n, 0, K, BLOCK_K)
    k1 = load_half_rows(key + node * key_n, 1, K, BLOCK_K)
    S_next = read_tile(state, V - c_0, K, state_k, state_v, BLOCK_V, KEYS, PER, IS_WHOLE)
    if IS_FETCHED:
        fetch_into_l2(state, path_decay, BLOCK_V * K)
    f0 = load_path_keys(trunk_keys, length, 0, ib, ik, KEYS, T, HK, K)
    f1 = load_path_keys(trunk_keys, length, KEYS, ib, ik, KEYS, T, HK, K)
    weight, end = load_trunk_weights(trunk_scale, trunk_decay, length, 0, ib, ih, T, HK, GROUPS)
    decay = tl.exp(end)
    u_next = load_path_values(trunk_values, length, ib, ih, c_0 + r, T, HV, V)
    v_next = load_values(value + node * value_n, c_0 + r, is_live_i, V)
    # An inert node is nobody's ancestor, not even its own.
    is_live = is_above(word, t % 16)
    A = is_above(word[None, :], slot[:, None])
    x_scale = inverse_norm_of_halves(x0, x1, NORM_EPS)
    X, of_raw, b, g = operators_of_block(k0, k1, x0, x1, x_scale, A, is_live, log_a, b, SCALE, PRECISION)
    X = solve(X, height, SOLVE_PRECISION)
    of_xS = tl.where(is_live, tl.exp(g) * of_raw, 0.0)
    if part_0 == 0:
        tl.store(path_decay + node_t * HV, g, mask=in_row & is_key)
        if ih % GROUPS == 0:
            tl.store(key_scale + node_t * HK, tl.where(is_live, x_scale, 0.0), mask=in_row & is_key)
    if IS_FETCHED and PARTS > 1:
        fetch_into_l2(state + BLOCK_V * state_v, path_decay, BLOCK_V * K)
    x0 = keys_of_matrix(x0, KEYS, PER)
    x1 = keys_of_matrix(x1, KEYS, PER)
    f0 = keys_of_matrix(f0, KEYS, PER)
    f1 = keys_of_matrix(f1, KEYS, PER)

    for i in tl.static_range(2 * PARTS):
        S = S_next
        if i + 1 < 2 * PARTS:
            # Before the half tile in hand is stored, which no later load may pass.
            S_next = read_tile(
                state + (i + 1) // 2 * BLOCK_V * state_v + (i + 1) % 2 * KEYS * state_k,
                *(V - c_0 - (i + 1) // 2 * BLOCK_V, K - (i + 1) % 2 * KEYS),
                *(state_k, state_v, BLOCK_V, KEYS, PER, IS_WHOLE),
            )
        if i % 2 == 0:
            u = u_next * weight[None, :]
            v = v_next
            xS = tl.zeros([BLOCK_V, 32], tl.float32)
            if i + 2 < 2 * PARTS:
                u_next = load_path_values(trunk_values, length, ib, ih, c_0 + (i // 2 + 1) * BLOCK_V + r, T, HV, V)
                v_next = load_values(value + node * value_n, c_0 + (i // 2 + 1) * BLOCK_V + r, is_live_i, V)
        S = fold_into_tile(
            *(S, u, f0 if i % 2 == 0 else f1, decay, length),
            state + i // 2 * BLOCK_V * state_v + i % 2 * KEYS * state_k,
            *(V - c_0 - i // 2 * BLOCK_V, K - i % 2 * KEYS, state_k, state_v, BLOCK_V, KEYS, PER, PRECISION),
        )
        xS = exact_product(S, tl.trans(x0 if i % 2 == 0 else x1), xS, PRECISION)
        if i % 2 == 1:
            c = c_0 + i // 2 * BLOCK_V + r
            store_results(
                *(xS, of_xS, v, b, X, pseudo_values, output, node, c, N, HV, V),
                *(SOLVE_PRECISION, VALUE_TERMS, VALUE_PRECISION),
            )
