"""Verify a draft tree against one state: ``(I + G) U = R``, ``o = exp(g) S^T q + P U``, U never leaving registers.

    R = beta (v - exp(g) S^T k)      with a trunk: S = exp(G) S_0 + sum of exp(G - g_j) k_j u_j^T, never formed
    block of internal nodes:   U = R (I + GT)^-1       O += U PT          (tree_block_kernel.py)
    every later block:         R -= U GT               O += U PT

Slots are positions in ``order``: internal nodes fill the first blocks of 16 and leaves, which are nobody's ancestor, the
rest, so a block of leaves costs one product with each internal block and no solve.

One program owns one (batch row, value head) and BLOCK_V value columns, all transposed: value columns on the 64-row side of
the matrix unit, nodes on its narrow side. It reads its part of the state once, streamed if there is one block and else whole,
splits a float32 state into two bfloat16 terms and multiplies both with each block's raw keys and queries, whose norms multiply
the products.
At its start it asks for the state part of the program AHEAD places later to be fetched into L2, so that memory stays busy
while programs are in their chains of small products; it finds its own part there.

Bytes: 4 K V a head for the state, and 2 K (N/groups) + 8 V N for the nodes. FLOPs: 8 K V N of state products, and by
BLOCK_V columns 4 K 16 N of Gram products: memory bounds it up to about 40 nodes.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product, product_of_split, split
from treewy_inductor.lowerings.fetch_ahead_kernel import fetch_into_l2
from treewy_inductor.lowerings.tree_block_kernel import (
    block_nodes,
    block_products,
    inverse_norm,
    path_decays,
    read_block,
    solve_block,
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
    BLOCKS: tl.constexpr,  # of 16 slots
    COLUMNS: tl.constexpr,  # nodes a word of ancestors, 16 if N <= 16 else 64
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K
    CHUNK: tl.constexpr,  # of the key dimension in products of keys with keys
    STREAM: tl.constexpr,  # of the key dimension in a step of streaming the state
    STAGES: tl.constexpr,  # steps in flight
    AHEAD: tl.constexpr,  # programs, 0: fetch nothing ahead
    PRECISION: tl.constexpr,  # of products with raw queries and keys
    SOLVE_PRECISION: tl.constexpr,  # of products of float32 with float32
):
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HV: tl.constexpr = HK * GROUPS
    pid = tl.program_id(0)
    if AHEAD > 0:
        later = tl.minimum(pid + AHEAD, tl.num_programs(0) - 1)
        LINE: tl.constexpr = 128 // (state.dtype.element_ty.primitive_bitwidth // 8)
        lines = tl.arange(0, BLOCK_V * BLOCK_K // LINE)
        row = later % V_BLOCKS * BLOCK_V + lines // (BLOCK_K // LINE)
        part = state + (later // (V_BLOCKS * HV)).to(tl.int64) * state_b + later // V_BLOCKS % HV * state_h
        fetch_into_l2(part + row * state_v + lines % (BLOCK_K // LINE) * LINE, path_decay, BLOCK_V * BLOCK_K // LINE)

    iv = pid % V_BLOCKS
    ih = pid // V_BLOCKS % HV
    ib = (pid // (V_BLOCKS * HV)).to(tl.int64)
    ik = ih // GROUPS
    c = iv * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_K)
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

    # What needs no state comes before it is loaded: it would wait in registers.
    node_0, is_live_0, k_0, q_0, k_scale_0, q_scale, b, g_0 = read_block(
        *(query, query_n, key, key_n, log_decay, log_decay_n, beta, beta_n, ancestors, order, 0, N),
        *(SCALE, NORM_EPS, K, BLOCK_K, W, COLUMNS),
    )
    # Loaded here too: torch takes whatever goes into a called function for part of the addresses that its results make, and
    # would count queries, keys and trees among the tensors that the stores below write.
    node_0 = tl.load(order + i, mask=i < N, other=0)
    tile = in_v[:, None] & (i < N)[None, :]
    v = tl.load(value + node_0[None, :] * value_n + c[:, None], mask=tile, other=0.0)
    GT, PT = block_products(
        *(query, query_n, key, key_n, ancestors, node_0, is_live_0, k_scale_0, g_0),
        *(node_0, is_live_0, b * k_scale_0, q_scale, g_0, True, K, CHUNK, W, PRECISION),
    )
    if iv == 0:
        tl.store(path_decay + (ib * N + node_0) * HV + ih, tl.where(is_live_0, g_0, 0.0), mask=i < N)
        if ih % GROUPS == 0:
            tl.store(key_scale + (ib * N + node_0) * HK + ik, tl.where(is_live_0, k_scale_0, 0.0), mask=i < N)

    state += ib * state_b + ih * state_h + c[:, None] * state_v
    IS_WHOLE: tl.constexpr = BLOCK_K == K and V % BLOCK_V == 0
    IS_ONE_TERM: tl.constexpr = state.dtype.element_ty == tl.bfloat16
    kS = tl.zeros([BLOCK_V, 16], tl.float32)
    qS = tl.zeros([BLOCK_V, 16], tl.float32)
    if BLOCKS == 1:
        # One block meets the state once: it streams through shared memory.
        for start in tl.range(0, BLOCK_K, STREAM, num_stages=STAGES):
            e = start + tl.arange(0, STREAM)
            in_k = (i < N)[:, None] & (e < K)[None, :]
            if IS_WHOLE:
                S = tl.load(state + e[None, :] * state_k)
            else:
                S = tl.load(state + e[None, :] * state_k, mask=in_v[:, None] & (e < K)[None, :], other=0.0)
            k = tl.load(key + node_0[:, None] * key_n + e[None, :], mask=in_k, other=0.0)
            q = tl.load(query + node_0[:, None] * query_n + e[None, :], mask=in_k, other=0.0)
            kS = exact_product(S, tl.trans(k), kS, PRECISION)
            qS = exact_product(S, tl.trans(q), qS, PRECISION)
    else:
        if IS_WHOLE:
            S = tl.load(state + d[None, :] * state_k)
        else:
            S = tl.load(state + d[None, :] * state_k, mask=in_v[:, None] & (d < K)[None, :], other=0.0)
        S_hi, S_lo = split(S, PRECISION)
        kS = product_of_split(S_hi, S_lo, tl.trans(k_0), IS_ONE_TERM, PRECISION)
        qS = product_of_split(S_hi, S_lo, tl.trans(q_0), IS_ONE_TERM, PRECISION)
    if T > 0:
        kS, qS = add_trunk(
            *(kS, qS, k_0, q_0, trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length, ib, ih, c, in_v),
            *(T, HK, GROUPS, K, V, BLOCK_K, PRECISION, SOLVE_PRECISION),
        )
    # Chosen, not multiplied: an inert node may hold NaN.
    R = tl.where(is_live_0[None, :], b[None, :] * v.to(tl.float32) - (tl.exp(g_0) * b * k_scale_0)[None, :] * kS, 0.0)
    o = tl.where(is_live_0[None, :], (tl.exp(g_0) * q_scale)[None, :] * qS, 0.0)
    U_0 = solve_block(R, GT, height, SOLVE_PRECISION)
    o = exact_product(U_0, PT, o, SOLVE_PRECISION)
    out = node_0[None, :] * (HV * V) + c[:, None]
    tl.store(output + out, o.to(output.dtype.element_ty), mask=tile)
    tl.store(pseudo_values + out, U_0, mask=tile)

    if BLOCKS > 1:
        blocks = tl.cdiv(tl.load(internal + ib), 16)
        for block in tl.range(1, BLOCKS, num_stages=1):
            node, is_live, k, q, k_scale, q_scale, b, g = read_block(
                *(query, query_n, key, key_n, log_decay, log_decay_n, beta, beta_n, ancestors, order, block * 16, N),
                *(SCALE, NORM_EPS, K, BLOCK_K, W, COLUMNS),
            )
            in_row = block * 16 + i < N
            node = tl.load(order + block * 16 + i, mask=in_row, other=0)
            tile = in_v[:, None] & in_row[None, :]
            v = tl.load(value + node[None, :] * value_n + c[:, None], mask=tile, other=0.0)
            qk = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * q_scale * k_scale
            kS = product_of_split(S_hi, S_lo, tl.trans(k), IS_ONE_TERM, PRECISION)
            qS = product_of_split(S_hi, S_lo, tl.trans(q), IS_ONE_TERM, PRECISION)
            if T > 0:
                kS, qS = add_trunk(
                    *(kS, qS, k, q, trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length, ib, ih, c, in_v),
                    *(T, HK, GROUPS, K, V, BLOCK_K, PRECISION, SOLVE_PRECISION),
                )
            R = tl.where(is_live[None, :], b[None, :] * v.to(tl.float32) - (tl.exp(g) * b * k_scale)[None, :] * kS, 0.0)
            o = tl.where(is_live[None, :], (tl.exp(g) * q_scale)[None, :] * qS, 0.0)
            GT, PT = block_products(
                *(query, query_n, key, key_n, ancestors, node_0, is_live_0, k_scale_0, g_0),
                *(node, is_live, b * k_scale, q_scale, g, False, K, CHUNK, W, PRECISION),
            )
            R = exact_product(U_0, -GT, R, SOLVE_PRECISION)
            o = exact_product(U_0, PT, o, SOLVE_PRECISION)
            for above in tl.range(1, tl.minimum(block, blocks), num_stages=1):
                node_i, is_live_i = block_nodes(order, ancestors, above * 16, N, W)
                k_i = tl.load(key + node_i[:, None] * key_n + d[None, :], mask=(d < K)[None, :], other=0.0)
                g_i = path_decays(log_decay, log_decay_n, ancestors, node_i, N, W, COLUMNS)
                GT, PT = block_products(
                    *(query, query_n, key, key_n, ancestors, node_i, is_live_i, inverse_norm(k_i, NORM_EPS), g_i),
                    *(node, is_live, b * k_scale, q_scale, g, False, K, CHUNK, W, PRECISION),
                )
                # Written by this program, before the barrier below.
                U_i = tl.load(pseudo_values + node_i[None, :] * (HV * V) + c[:, None], mask=in_v[:, None], other=0.0)
                R = exact_product(U_i, -GT, R, SOLVE_PRECISION)
                o = exact_product(U_i, PT, o, SOLVE_PRECISION)
            if block < blocks:
                GT, PT = block_products(
                    *(query, query_n, key, key_n, ancestors, node, is_live, k_scale, g),
                    *(node, is_live, b * k_scale, q_scale, g, True, K, CHUNK, W, PRECISION),
                )
                R = solve_block(R, GT, height, SOLVE_PRECISION)
                o = exact_product(R, PT, o, SOLVE_PRECISION)
            else:
                o += tl.where(is_live, qk, 0.0)[None, :] * R
            out = node[None, :] * (HV * V) + c[:, None]
            tl.store(output + out, o.to(output.dtype.element_ty), mask=tile)
            tl.store(pseudo_values + out, R, mask=tile)
            if iv == 0:
                tl.store(path_decay + (ib * N + node) * HV + ih, tl.where(is_live, g, 0.0), mask=in_row)
                if ih % GROUPS == 0:
                    tl.store(key_scale + (ib * N + node) * HK + ik, tl.where(is_live, k_scale, 0.0), mask=in_row)
            if BLOCKS > 2:
                tl.debug_barrier()
