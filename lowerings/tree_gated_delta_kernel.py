"""Verify a draft tree against one state: ``(I + G) U = R``, ``o = exp(g) S^T q + P U``, U never leaving registers.

    R = beta (v - exp(g) S^T k)      with a trunk: S = exp(G) S_0 + sum of exp(G - g_j) k_j u_j^T, never formed
    16 nodes or fewer:           U = R + R C,  O += R (PT + C PT)                     C = (I + GT)^-1 - I
    else, block of 16 by block:  U_i = R_i + R_i C,  R -= U_i GT,  O += U_i PT        R is U when all blocks are done

Slots are nodes if there are at most 16, and else positions in ``order``: internal nodes fill the first blocks, and leaves,
which are nobody's ancestor, cost one product with each internal block and no solve.

One program owns one (batch row, value head) and BLOCK_V value columns, all transposed: value columns on the 64-row side of
the matrix unit, SLOTS nodes on its narrow side. What counts is how long a program waits, not what it computes. So it first
asks for its part of the state to be fetched into L2, then for all that is small at once; makes C and the products of block 0
while the state is on its way; streams the state once in steps of STREAM keys; and is then two dependent products from its end.
A float32 state enters as two bfloat16 terms; bfloat16 queries and keys enter raw, hence exactly, and their norms multiply the
products. More than 64 nodes stream the state, by then in L2, once for each 64.

Bytes: 4 K V a head for the state, and 2 K (N/groups) + 8 V N for the nodes. FLOPs: 8 K V N of state products, and by
BLOCK_V columns 4 K 16 N of Gram products: memory bounds it up to about 40 nodes.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product
from treewy_inductor.lowerings.fetch_ahead_kernel import fetch_into_l2
from treewy_inductor.lowerings.tree_block_kernel import (
    block_operators,
    decays_between,
    inverse_correction,
    inverse_norm,
    is_live_node,
    load_rows,
    path_decays,
    raw_product,
    slots_of_block,
)
from treewy_inductor.lowerings.trunk_kernel import add_trunk


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
    query_n,
    query_h,
    key_b,
    key_n,
    key_h,
    value_b,
    value_n,
    value_h,
    log_decay_b,
    log_decay_n,
    log_decay_h,
    beta_b,
    beta_n,
    beta_h,
    state_b,
    state_h,
    state_k,
    state_v,
    N,
    SCALE: tl.constexpr,
    NORM_EPS: tl.constexpr,  # negative: query and key come normalised
    HK: tl.constexpr,
    GROUPS: tl.constexpr,  # value heads a key head
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,  # slots of the trunk between the state and the tree
    SLOTS: tl.constexpr,  # 16, 32 or 64: nodes a pass over the state
    PASSES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K
    STREAM: tl.constexpr,  # of the key dimension in a step of streaming the state
    STAGES: tl.constexpr,  # steps in flight
    IS_FETCHED: tl.constexpr,  # the program's part of the state is asked for at its start
    PRECISION: tl.constexpr,  # of products with raw queries and keys
    SOLVE_PRECISION: tl.constexpr,  # of products of float32 with float32
):
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HV: tl.constexpr = HK * GROUPS
    COLUMNS: tl.constexpr = 16 if SLOTS == 16 else 32
    pid = tl.program_id(0)
    iv = pid % V_BLOCKS
    ih = pid // V_BLOCKS % HV
    ib = (pid // (V_BLOCKS * HV)).to(tl.int64)
    ik = ih // GROUPS
    state += ib * state_b + ih * state_h
    if IS_FETCHED:
        LINE: tl.constexpr = 128 // (state.dtype.element_ty.primitive_bitwidth // 8)
        line = tl.arange(0, BLOCK_V * BLOCK_K // LINE)
        part = (iv * BLOCK_V + line // (BLOCK_K // LINE)) * state_v + line % (BLOCK_K // LINE) * LINE
        fetch_into_l2(state + part, path_decay, BLOCK_V * BLOCK_K // LINE)

    c = iv * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, 16)
    in_v = c < V
    order += ib * N
    ancestors += ib * N * W
    query += ib * query_b + ik * query_h
    key += ib * key_b + ik * key_h
    value += ib * value_b + ih * value_h
    log_decay += ib * log_decay_b + ih * log_decay_h
    beta += ib * beta_b + ih * beta_h
    output += (ib * N * HV + ih) * V
    pseudo_values += (ib * N * HV + ih) * V
    height = tl.load(height + ib)
    internal_blocks = tl.maximum(tl.cdiv(tl.load(internal + ib), 16), 1)

    for first in tl.range(0, PASSES * SLOTS, SLOTS, num_stages=1):
        slot = first + tl.arange(0, SLOTS)
        in_row = slot < N
        # Loaded here and not in a function: torch takes whatever goes into one for part of the addresses that its results make,
        # and would count trees among the tensors that the stores below write.
        node = tl.minimum(slot, N - 1) if SLOTS == 16 else tl.load(order + slot, mask=in_row, other=0)
        tile = in_v[:, None] & in_row[None, :]
        # All loads come before all products: one wait for memory, not one a step.
        k = load_rows(key, key_n, node, K, BLOCK_K)
        q = load_rows(query, query_n, node, K, BLOCK_K)
        b = tl.load(beta + node * beta_n).to(tl.float32)
        is_live = is_live_node(ancestors, node, W) & in_row
        g = path_decays(log_decay, log_decay_n, ancestors, node, N, W, COLUMNS)
        k_scale = inverse_norm(k, NORM_EPS)
        q_scale = inverse_norm(q, NORM_EPS) * SCALE
        if iv == 0:
            tl.store(path_decay + (ib * N + node) * HV + ih, tl.where(is_live, g, 0.0), mask=in_row)
            if ih % GROUPS == 0:
                tl.store(key_scale + (ib * N + node) * HK + ik, tl.where(is_live, k_scale, 0.0), mask=in_row)
        if SLOTS == 16:
            A, D = decays_between(ancestors, node, is_live, g, node, is_live, g, W)
            D *= k_scale[None, :]
            # Chosen, not multiplied, here and below: an inert node may hold NaN.
            G = tl.where(A & (i[:, None] != i[None, :]), raw_product(k, k, PRECISION) * D * (b * k_scale)[:, None], 0.0)
            C = inverse_correction(G, height, SOLVE_PRECISION)
            P = tl.where(A, raw_product(q, k, PRECISION) * D * q_scale[:, None], 0.0)
            P = exact_product(P, C, P, SOLVE_PRECISION)
        else:
            own = tl.sum(k.to(tl.float32) * q.to(tl.float32), 1) * k_scale * q_scale
            own = tl.where(is_live & (slot >= 16 * internal_blocks), own, 0.0)
        if SLOTS > 16 and PASSES == 1:
            G, P, C = block_operators(
                *(query, query_n, key, key_n, log_decay, log_decay_n, beta, beta_n, ancestors, order, 0, N, height),
                *(k, q, node, is_live, b * k_scale, q_scale, g),
                *(NORM_EPS, K, BLOCK_K, W, COLUMNS, PRECISION, SOLVE_PRECISION),
            )

        v = tl.load(value + node[None, :] * value_n + c[:, None], mask=tile, other=0.0)
        kS = tl.zeros([BLOCK_V, SLOTS], tl.float32)
        qS = tl.zeros([BLOCK_V, SLOTS], tl.float32)
        for start in tl.range(0, BLOCK_K, STREAM, num_stages=STAGES):
            e = start + tl.arange(0, STREAM)
            if BLOCK_K == K and V % BLOCK_V == 0:
                S = tl.load(state + c[:, None] * state_v + e[None, :] * state_k)
            else:
                in_state = in_v[:, None] & (e < K)[None, :]
                S = tl.load(state + c[:, None] * state_v + e[None, :] * state_k, mask=in_state, other=0.0)
            if BLOCK_K == K:
                k_e = tl.load(key + node[:, None] * key_n + e[None, :])
                q_e = tl.load(query + node[:, None] * query_n + e[None, :])
            else:
                k_e = tl.load(key + node[:, None] * key_n + e[None, :], mask=(e < K)[None, :], other=0.0)
                q_e = tl.load(query + node[:, None] * query_n + e[None, :], mask=(e < K)[None, :], other=0.0)
            kS = exact_product(S, tl.trans(k_e), kS, PRECISION)
            qS = exact_product(S, tl.trans(q_e), qS, PRECISION)
        if T > 0:
            kS, qS = add_trunk(
                *(kS, qS, load_rows(key, key_n, node, K, BLOCK_K), load_rows(query, query_n, node, K, BLOCK_K)),
                *(trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length, ib, ih, c, in_v),
                *(T, HK, GROUPS, K, V, BLOCK_K, PRECISION, SOLVE_PRECISION),
            )
        R = tl.where(is_live[None, :], b[None, :] * v.to(tl.float32) - (tl.exp(g) * b * k_scale)[None, :] * kS, 0.0)
        o = tl.where(is_live[None, :], (tl.exp(g) * q_scale)[None, :] * qS, 0.0)
        if SLOTS == 16:
            o = exact_product(R, tl.trans(P), o, SOLVE_PRECISION)
            R = exact_product(R, tl.trans(C), R, SOLVE_PRECISION)
        else:
            if PASSES == 1:
                R_i = slots_of_block(R, 0)
                U_i = exact_product(R_i, tl.trans(C), R_i, SOLVE_PRECISION)
                R = exact_product(U_i, tl.trans(G), R, SOLVE_PRECISION)
                o = exact_product(U_i, tl.trans(P), o, SOLVE_PRECISION)
            if PASSES > 1:
                for block in tl.range(0, tl.minimum(internal_blocks, first // 16), num_stages=1):
                    G, P, _ = block_operators(
                        *(query, query_n, key, key_n, log_decay, log_decay_n, beta, beta_n, ancestors, order, block, N, height),
                        *(load_rows(key, key_n, node, K, BLOCK_K), load_rows(query, query_n, node, K, BLOCK_K)),
                        *(node, is_live, b * k_scale, q_scale, g),
                        *(NORM_EPS, K, BLOCK_K, W, COLUMNS, PRECISION, SOLVE_PRECISION),
                    )
                    # Written by this program in an earlier pass, before the barrier below.
                    node_i = tl.load(order + block * 16 + i)
                    U_i = tl.load(pseudo_values + node_i[None, :] * (HV * V) + c[:, None], mask=in_v[:, None], other=0.0)
                    R = exact_product(U_i, tl.trans(G), R, SOLVE_PRECISION)
                    o = exact_product(U_i, tl.trans(P), o, SOLVE_PRECISION)
            for block in tl.range(
                first // 16 + (PASSES == 1), tl.minimum(internal_blocks, (first + SLOTS) // 16), num_stages=1
            ):
                G, P, C = block_operators(
                    *(query, query_n, key, key_n, log_decay, log_decay_n, beta, beta_n, ancestors, order, block, N, height),
                    *(load_rows(key, key_n, node, K, BLOCK_K), load_rows(query, query_n, node, K, BLOCK_K)),
                    *(node, is_live, b * k_scale, q_scale, g),
                    *(NORM_EPS, K, BLOCK_K, W, COLUMNS, PRECISION, SOLVE_PRECISION),
                )
                R_i = slots_of_block(R, block - first // 16)
                U_i = exact_product(R_i, tl.trans(C), R_i, SOLVE_PRECISION)
                R = exact_product(U_i, tl.trans(G), R, SOLVE_PRECISION)
                o = exact_product(U_i, tl.trans(P), o, SOLVE_PRECISION)
            o += own[None, :] * R
        out = node[None, :] * (HV * V) + c[:, None]
        tl.store(output + out, o.to(output.dtype.element_ty), mask=tile)
        tl.store(pseudo_values + out, R, mask=tile)
        if PASSES > 1:
            tl.debug_barrier()
