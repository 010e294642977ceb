"""Verify a draft tree against one state: ``(I + G) U = R``, ``o = exp(g) S^T q + P U``, U never leaving registers.

    R = beta (v - exp(g) S^T k)      with a trunk: S = exp(G) S_0 + sum of exp(G - g_j) k_j u_j^T, never formed
    16 nodes or fewer:           U = R + C R,  O += (P + P C) R                       C = (I + G)^-1 - I
    16 internal nodes or fewer:  U_i = R_i + C R_i,  R -= G U_i,  O += P U_i           R is then U
    else                         block of 16 by block: verify_by_blocks_kernel.py

Slots are nodes if there are at most 16, and else positions in ``order``: internal nodes fill the first 16, and leaves, which
are nobody's ancestor, cost one product with them and no solve.

One program owns one (batch row, key head), HEADS of its value heads and PARTS blocks of BLOCK_V value columns of each, all
transposed: value columns on the 64-row side of the matrix unit, SLOTS nodes on its narrow side. Products of keys with keys and
queries are made once a program, operators once a value head, and each part of the state is streamed once in steps of STREAM
keys; a program asks for the next part to be fetched into L2 while it works on one. A float32 state enters as two bfloat16
terms; bfloat16 queries and keys enter raw, hence exactly, and their norms multiply the products.

Bytes: 4 K V a value head for the state, and 2 K (N/groups) + 8 V N for the nodes. FLOPs: 8 K V N of state products, and by
program 4 K 16 N of Gram products. Memory bounds it up to about 40 nodes if enough programs wait at once: registers decide.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product
from treewy_inductor.lowerings.fetch_ahead_kernel import fetch_into_l2
from treewy_inductor.lowerings.tree_block_kernel import (
    inverse_correction,
    inverse_norm,
    is_above,
    load_once,
    load_rows,
    raw_product,
    state_products,
)
from treewy_inductor.lowerings.trunk_kernel import load_trunk, state_products_below_trunk
from treewy_inductor.lowerings.verify_by_blocks_kernel import verify_by_blocks
from treewy_inductor.lowerings.verify_with_leaves_kernel import verify_with_leaves


@triton.jit
def tree_gated_delta_kernel(
    query,  # [B, N, HK, K] float, stride 1 along K
    key,  # [B, N, HK, K] float, stride 1 along K
    value,  # [B, N, HV, V] float, stride 1 along V
    log_decay,  # [B, N, HV] float
    beta,  # [B, N, HV] float
    state,  # [B, HV, K, V] float, any strides
    ancestors,  # [B, N, W] int64, contiguous
    order,  # [B, N] int32, contiguous
    internal,  # [B] int32
    height,  # [B] int32
    trunk_keys,  # [B, T, HK, K] float, contiguous, as are the next four; not read if T is 0
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
    query_n: tl.constexpr,  # as constants these make rows immediate offsets of one address
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
    W: tl.constexpr,
    T: tl.constexpr,  # slots of the trunk between the state and the tree
    SLOTS: tl.constexpr,  # 16, 32, 48 or 80, the first that N is not above; 0 past 64: always block by block
    HEADS: tl.constexpr,  # value heads a program, divides GROUPS
    PARTS: tl.constexpr,  # blocks of value columns a program, divides their number
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K
    STREAM: tl.constexpr,  # of the key dimension in a step of streaming the state
    STAGES: tl.constexpr,  # steps in flight
    IS_FETCHED: tl.constexpr,  # a part of the state, contiguous, is asked for one part ahead
    PRECISION: tl.constexpr,  # of products with raw queries and keys
    SOLVE_PRECISION: tl.constexpr,  # of products of float32 with float32
):
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HV: tl.constexpr = HK * GROUPS
    V_PROGRAMS: tl.constexpr = V_BLOCKS // PARTS
    PROGRAMS: tl.constexpr = V_PROGRAMS * (GROUPS // HEADS)
    pid = tl.program_id(0)
    part_0 = pid % V_PROGRAMS * PARTS
    ik = pid // PROGRAMS % HK
    ih_0 = ik * GROUPS + pid // V_PROGRAMS % (GROUPS // HEADS) * HEADS
    ib = (pid // (PROGRAMS * HK)).to(tl.int64)
    state += ib * state_b + ih_0 * state_h
    if IS_FETCHED:
        fetch_into_l2(state + part_0 * BLOCK_V * state_v, path_decay, BLOCK_V * K)
    order += ib * N
    ancestors += ib * N * W
    query += ib * query_b + ik * query_h
    key += ib * key_b + ik * key_h
    value += ib * value_b + ih_0 * value_h
    log_decay += ib * log_decay_b + ih_0 * log_decay_h
    beta += ib * beta_b + ih_0 * beta_h
    output += (ib * N * HV + ih_0) * V
    pseudo_values += (ib * N * HV + ih_0) * V
    path_decay += ib * N * HV + ih_0
    height = tl.load(height + ib)
    if SLOTS == 16:
        slot = tl.arange(0, 16)
        in_row = slot < N
        node = tl.minimum(slot, N - 1)
        row = tl.arange(0, 32)
        row_node = tl.minimum(row % 16, N - 1)
        rows = tl.where(row < 16, key + row_node * key_n, query + row_node * query_n)
        # All loads of what is small come before all products: one wait for memory, not one a step.
        word = load_once(ancestors + node, in_row)
        log_a = load_once(log_decay + node * log_decay_n, in_row).to(tl.float32)
        b = load_once(beta + node * beta_n, in_row).to(tl.float32)
        k = load_rows(key, key_n, node, K, BLOCK_K)
        q = load_rows(query, query_n, node, K, BLOCK_K)
        # An inert node is nobody's ancestor, not even its own.
        is_live = is_above(word, node) & in_row
        # Ancestors along the first axis: operators are made transposed, as the products below read them.
        A = is_above(word[None, :], slot[:, None]) & is_live[None, :] & is_live[:, None]
        k_scale = inverse_norm(k, NORM_EPS)
        q_scale = inverse_norm(q, NORM_EPS) * SCALE
        KK = raw_product(k, k, PRECISION)
        KQ = raw_product(k, q, PRECISION)
        if pid % PROGRAMS == 0:
            tl.store(key_scale + (ib * N + node) * HK + ik, tl.where(is_live, k_scale, 0.0), mask=in_row)

        for head in tl.range(0, HEADS, num_stages=1):
            if T > 0:
                length = tl.load(trunk_length + ib)
                k_j, weight, u_j, end = load_trunk(
                    *(trunk_keys, trunk_scale, trunk_values, trunk_decay, length, 0, ib, ih_0 + head),
                    *(part_0 * BLOCK_V + tl.arange(0, BLOCK_V), T, HK, GROUPS, K, V, BLOCK_K),
                )
            g = tl.sum(tl.where(A, log_a[:, None], 0.0), 0)
            # Chosen, not multiplied, here and below: an inert node may hold NaN.
            beta_t = tl.where(is_live, b, 0.0)
            D = tl.exp(tl.where(A, g[None, :] - g[:, None], 0.0)) * k_scale[:, None]
            G = tl.where(A & (slot[:, None] != slot[None, :]), KK * D * (beta_t * k_scale)[None, :], 0.0)
            C = inverse_correction(G, height, SOLVE_PRECISION)
            P = tl.where(A, KQ * D * q_scale[None, :], 0.0)
            P = exact_product(C, P, P, SOLVE_PRECISION)
            if part_0 == 0:
                tl.store(path_decay + node * HV + head, g, mask=in_row)
            of_kS = tl.exp(g) * beta_t * k_scale
            of_qS = tl.where(is_live, tl.exp(g) * q_scale, 0.0)
            # Of the next head, while this one's parts are streamed.
            next_head = tl.minimum(head + 1, HEADS - 1)
            log_a = load_once(log_decay + next_head * log_decay_h + node * log_decay_n, in_row).to(tl.float32)
            b = load_once(beta + next_head * beta_h + node * beta_n, in_row).to(tl.float32)

            for part in tl.range(0, PARTS, num_stages=1):
                c = (part_0 + part) * BLOCK_V + tl.arange(0, BLOCK_V)
                in_v = c < V
                tile = in_v[:, None] & in_row[None, :]
                v = tl.load(value + head * value_h + node[None, :] * value_n + c[:, None], mask=tile, other=0.0)
                if IS_FETCHED and HEADS * PARTS > 1:
                    later = tl.minimum(head * PARTS + part + 1, HEADS * PARTS - 1)
                    column = (part_0 + later % PARTS) * BLOCK_V
                    fetch_into_l2(state + later // PARTS * state_h + column * state_v, path_decay, BLOCK_V * K)
                if T > 0:
                    if PARTS > 1:
                        k_j, weight, u_j, end = load_trunk(
                            *(trunk_keys, trunk_scale, trunk_values, trunk_decay, length, 0, ib, ih_0 + head, c),
                            *(T, HK, GROUPS, K, V, BLOCK_K),
                        )
                    kS, qS = state_products_below_trunk(
                        *(state + head * state_h, rows, c, k_j, weight, u_j, end),
                        *(trunk_keys, trunk_scale, trunk_values, trunk_decay, length, ib, ih_0 + head),
                        *(state_k, state_v, T, HK, GROUPS, K, V),
                        *(BLOCK_V, BLOCK_K, STREAM, STAGES, PRECISION, SOLVE_PRECISION),
                    )
                else:
                    kS, qS = state_products(
                        *(state + head * state_h, rows, c),
                        *(state_k, state_v, K, V, BLOCK_V, BLOCK_K, STREAM, STAGES, PRECISION),
                    )
                R = tl.where((beta_t != 0.0)[None, :], beta_t[None, :] * v.to(tl.float32) - of_kS[None, :] * kS, 0.0)
                o = tl.where((of_qS != 0.0)[None, :], of_qS[None, :] * qS, 0.0)
                o = exact_product(R, P, o, SOLVE_PRECISION)
                R = exact_product(R, C, R, SOLVE_PRECISION)
                out = node[None, :] * (HV * V) + head * V + c[:, None]
                tl.store(output + out, o.to(output.dtype.element_ty), mask=tile)
                tl.store(pseudo_values + out, R, mask=tile)
    elif SLOTS > 16 and tl.load(internal + ib) <= 16:
        verify_with_leaves(
            *(query, key, value, log_decay, beta, state, ancestors, order, height),
            *(trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length),
            *(output, pseudo_values, path_decay, key_scale + ib * N * HK + ik),
            *(N, ib, ih_0, part_0, pid % PROGRAMS == 0),
            *(value_h, log_decay_h, beta_h, state_h),
            *(query_n, key_n, value_n, log_decay_n, beta_n, state_k, state_v),
            *(SCALE, NORM_EPS, HK, GROUPS, K, V, T, SLOTS - 16),
            *(HEADS, PARTS, BLOCK_V, BLOCK_K, STREAM, STAGES, IS_FETCHED, PRECISION, SOLVE_PRECISION),
        )
    else:
        for head in tl.range(0, HEADS, num_stages=1):
            for part in tl.range(0, PARTS, num_stages=1):
                verify_by_blocks(
                    *(query, key, value + head * value_h, log_decay + head * log_decay_h, beta + head * beta_h),
                    *(state + head * state_h, ancestors, order, tl.load(internal + ib), height),
                    *(trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length),
                    *(output + head * V, pseudo_values + head * V, path_decay + head, key_scale + ib * N * HK + ik),
                    *(N, ib, ih_0 + head, part_0 + part),
                    *(query_n, key_n, value_n, log_decay_n, beta_n, state_k, state_v),
                    *(SCALE, NORM_EPS, HK, GROUPS, K, V, W, T),
                    *(BLOCK_V, BLOCK_K, STREAM, STAGES, PRECISION, SOLVE_PRECISION),
                )
