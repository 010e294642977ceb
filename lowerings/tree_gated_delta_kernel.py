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
    columns,
    inverse_correction,
    inverse_norm,
    is_above,
    load_rows,
    path_decays,
    raw_product,
    state_products,
)
from treewy_inductor.lowerings.trunk_kernel import add_trunk
from treewy_inductor.lowerings.verify_by_blocks_kernel import verify_by_blocks


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
    SLOTS: tl.constexpr,  # 16 if N <= 16, 64 if N <= 64, 0: always block by block
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
    internal_nodes = tl.load(internal + ib)
    height = tl.load(height + ib)
    is_wide = SLOTS == 16 or (SLOTS > 16 and internal_nodes <= 16)
    if is_wide:
        M: tl.constexpr = 16 if SLOTS == 0 else SLOTS
        slot = tl.arange(0, M)
        i = tl.arange(0, 16)
        in_row = slot < N
        # Loaded here and not in a function: torch takes whatever goes into one for part of the addresses that its results make,
        # and would count trees among the tensors that the stores below write.
        node = tl.minimum(slot, N - 1) if SLOTS == 16 else tl.load(order + slot, mask=in_row, other=0)
        row = tl.arange(0, 2 * M)
        row_node = tl.minimum(row % M, N - 1) if SLOTS == 16 else tl.load(order + row % M, mask=row % M < N, other=0)
        rows = tl.where(row < M, key + row_node * key_n, query + row_node * query_n)
        # All loads of what is small come before all products: one wait for memory, not one a step.
        word = tl.load(ancestors + node)
        log_a = tl.load(log_decay + slot * log_decay_n, mask=in_row, other=0.0)
        b = tl.load(beta + node * beta_n)
        k = load_rows(key, key_n, node, in_row, K, BLOCK_K)
        q = load_rows(query, query_n, node, in_row, K, BLOCK_K)
        # An inert node is nobody's ancestor, not even its own.
        is_live = is_above(word, node) & in_row
        k_scale = inverse_norm(k, NORM_EPS)
        q_scale = inverse_norm(q, NORM_EPS) * SCALE
        if SLOTS == 16:
            A = is_above(word[:, None], i[None, :]) & is_live[:, None] & is_live[None, :]
            is_strict = A & (i[:, None] != i[None, :])
            k_i_scale = k_scale
            KK = raw_product(k, k, PRECISION)
            QK = raw_product(q, k, PRECISION)
        else:
            node_i = tl.load(order + i, mask=i < N, other=0)
            k_i = load_rows(key, key_n, node_i, i < N, K, BLOCK_K)
            word_i = tl.load(ancestors + node_i)
            b_i = tl.load(beta + node_i * beta_n)
            is_live_i = is_above(word_i, node_i) & (i < N)
            k_i_scale = inverse_norm(k_i, NORM_EPS)
            A_i = is_above(word_i[:, None], node_i[None, :]) & is_live_i[:, None] & is_live_i[None, :]
            KK_i = raw_product(k_i, k_i, PRECISION)
            A = is_above(word[:, None], node_i[None, :]) & is_live[:, None] & is_live_i[None, :]
            is_strict = A & (node[:, None] != node_i[None, :])
            qk = tl.where(is_live & (slot >= 16), tl.sum(k.to(tl.float32) * q.to(tl.float32), 1) * k_scale * q_scale, 0.0)
            KK = raw_product(k, k_i, PRECISION)
            QK = raw_product(q, k_i, PRECISION)
        if pid % PROGRAMS == 0:
            tl.store(key_scale + (ib * N + node) * HK + ik, tl.where(is_live, k_scale, 0.0), mask=in_row)

        for head in tl.range(0, HEADS, num_stages=1):
            g = path_decays(word, log_a)
            beta_t = b.to(tl.float32)
            # Chosen, not multiplied, here and below: an inert node may hold NaN.
            if SLOTS == 16:
                D = tl.exp(tl.where(A, g[:, None] - g[None, :], 0.0)) * k_i_scale[None, :]
                G = tl.where(is_strict, KK * D * (beta_t * k_scale)[:, None], 0.0)
                C = inverse_correction(G, height, SOLVE_PRECISION)
                P = tl.where(A, QK * D * q_scale[:, None], 0.0)
                P = exact_product(P, C, P, SOLVE_PRECISION)
            else:
                g_i = path_decays(word_i, log_a)
                D = tl.exp(tl.where(A_i, g_i[:, None] - g_i[None, :], 0.0)) * k_i_scale[None, :]
                D *= (b_i.to(tl.float32) * k_i_scale)[:, None]
                G = tl.where(A_i & (i[:, None] != i[None, :]), KK_i * D, 0.0)
                C = inverse_correction(G, height, SOLVE_PRECISION)
                D = tl.exp(tl.where(A, g[:, None] - g_i[None, :], 0.0)) * k_i_scale[None, :]
                G = tl.where(is_strict, KK * D * (-beta_t * k_scale)[:, None], 0.0)
                P = tl.where(A, QK * D * q_scale[:, None], 0.0)
            if part_0 == 0:
                tl.store(path_decay + node * HV + head, tl.where(is_live, g, 0.0), mask=in_row)
            of_kS = tl.exp(g) * beta_t * k_scale
            of_qS = tl.exp(g) * q_scale
            # Of the next head, while this one's parts are streamed.
            next_head = tl.minimum(head + 1, HEADS - 1)
            log_a = tl.load(log_decay + next_head * log_decay_h + slot * log_decay_n, mask=in_row, other=0.0)
            b = tl.load(beta + next_head * beta_h + node * beta_n)
            if SLOTS > 16:
                b_i = tl.load(beta + next_head * beta_h + node_i * beta_n)

            for part in tl.range(0, PARTS, num_stages=1):
                c = (part_0 + part) * BLOCK_V + tl.arange(0, BLOCK_V)
                in_v = c < V
                tile = in_v[:, None] & in_row[None, :]
                v = tl.load(value + head * value_h + node[None, :] * value_n + c[:, None], mask=tile, other=0.0)
                if IS_FETCHED and HEADS * PARTS > 1:
                    later = tl.minimum(head * PARTS + part + 1, HEADS * PARTS - 1)
                    column = (part_0 + later % PARTS) * BLOCK_V
                    fetch_into_l2(state + later // PARTS * state_h + column * state_v, path_decay, BLOCK_V * K)
                kS, qS = state_products(
                    *(state + head * state_h, rows, c),
                    *(state_k, state_v, K, V, BLOCK_V, BLOCK_K, STREAM, STAGES, PRECISION),
                )
                if T > 0:
                    kS, qS = add_trunk(
                        *(
                            kS,
                            qS,
                            load_rows(key, key_n, node, in_row, K, BLOCK_K),
                            load_rows(query, query_n, node, in_row, K, BLOCK_K),
                        ),
                        *(trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length, ib, ih_0 + head, c, in_v),
                        *(T, HK, GROUPS, K, V, BLOCK_K, PRECISION, SOLVE_PRECISION),
                    )
                R = tl.where(is_live[None, :], beta_t[None, :] * v.to(tl.float32) - of_kS[None, :] * kS, 0.0)
                o = tl.where(is_live[None, :], of_qS[None, :] * qS, 0.0)
                if SLOTS == 16:
                    o = exact_product(R, tl.trans(P), o, SOLVE_PRECISION)
                    R = exact_product(R, tl.trans(C), R, SOLVE_PRECISION)
                else:
                    R_i = columns(R, 0, 16)
                    U_i = exact_product(R_i, tl.trans(C), R_i, SOLVE_PRECISION)
                    R = exact_product(U_i, tl.trans(G), R, SOLVE_PRECISION)
                    o = exact_product(U_i, tl.trans(P), o, SOLVE_PRECISION)
                    o += qk[None, :] * R
                out = node[None, :] * (HV * V) + head * V + c[:, None]
                tl.store(output + out, o.to(output.dtype.element_ty), mask=tile)
                tl.store(pseudo_values + out, R, mask=tile)
    else:
        if SLOTS != 16:
            for head in tl.range(0, HEADS, num_stages=1):
                for part in tl.range(0, PARTS, num_stages=1):
                    verify_by_blocks(
                        *(query, key, value + head * value_h, log_decay + head * log_decay_h, beta + head * beta_h),
                        *(state + head * state_h, ancestors, order, internal_nodes, height),
                        *(trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length),
                        *(output + head * V, pseudo_values + head * V, path_decay + head, key_scale + ib * N * HK + ik),
                        *(N, ib, ih_0 + head, part_0 + part),
                        *(
                            query_n,
                            key_n,
                            value_n,
                            log_decay_n,
                            beta_n,
                            state_k,
                            state_v,
                            SCALE,
                            NORM_EPS,
                            HK,
                            GROUPS,
                            K,
                            V,
                            W,
                            T,
                        ),
                        *(BLOCK_V, BLOCK_K, STREAM, STAGES, PRECISION, SOLVE_PRECISION),
                    )
