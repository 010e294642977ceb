"""Verify a draft tree against one state: ``(I + G) U = R``, ``o = exp(g) S^T q + P U``, U never leaving registers.

    R = beta (v - exp(g) S^T k)
    block of internal nodes:   U = R (I + GT)^-1       O += U PT          (tree_block_kernel.py)
    every later block:         R -= U GT               O += U PT

Slots are positions in ``order``: internal nodes fill the first blocks of 16 and leaves, which are nobody's ancestor, the
rest, so a block of leaves costs one product with each internal block and no solve.

One program owns one (batch row, value head) and BLOCK_V value columns, all transposed: value columns on the 64-row side of
the matrix unit, nodes on its narrow side. It loads its part of the state once, all rows in flight together, splits a float32
state into two bfloat16 terms and multiplies both with each block's raw keys and queries, whose norms multiply the products.
At its start it asks for the state part of the program AHEAD places later to be fetched into L2, so that memory stays busy
while programs are in their chains of small products; it finds its own part there.

Bytes: 4 K V a head for the state, and 2 K (N/groups) + 8 V N for the nodes. FLOPs: 8 K V N of state products, and by
BLOCK_V columns 4 K 16 N of Gram products: memory bounds it up to about 40 nodes.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product
from treewy_inductor.lowerings.tree_block_kernel import block_nodes, block_products, inverse_norm, path_decays, solve_block


@triton.jit
def fetch_into_l2(
    address,  # [LINES] pointers, 128 bytes apart
    sink,  # any output: what looks like a store to it never happens
    LINES: tl.constexpr,
):
    """Ask for the lines at ``address`` without waiting for them."""
    # The result keeps the instruction alive; declared impure, torch could not tell which tensors the kernel writes.
    zero = tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(sink + tl.arange(0, LINES), zero.to(sink.dtype.element_ty), mask=zero != 0)


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
    BLOCKS: tl.constexpr,  # of 16 slots
    COLUMNS: tl.constexpr,  # nodes a word of ancestors, 16 if N <= 16 else 64
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K
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
    in_v = c < V
    cells = state + ib * state_b + ih * state_h + c[:, None] * state_v + d[None, :] * state_k
    if BLOCK_K == K and V % BLOCK_V == 0:
        S = tl.load(cells)
    else:
        S = tl.load(cells, mask=in_v[:, None] & (d < K)[None, :], other=0.0)

    order += ib * N
    ancestors += ib * N * W
    query += ib * query_b + ik * query_h
    key += ib * key_b + ik * key_h
    value += ib * value_b + ih * value_h
    log_decay += ib * log_decay_b + ih * log_decay_h
    beta += ib * beta_b + ih * beta_h
    height = tl.load(height + ib)
    blocks = tl.cdiv(tl.load(internal + ib), 16)
    i = tl.arange(0, 16)
    zero = tl.zeros([BLOCK_V, 16], tl.float32)
    none = tl.zeros([16], tl.int32)
    # Of block 0, which most trees' internal nodes fit: kept for the blocks of leaves.
    U_0 = zero
    node_0 = none
    is_live_0 = none != 0
    k_0 = tl.zeros([16, BLOCK_K], key.dtype.element_ty)
    k_scale_0 = tl.zeros([16], tl.float32)
    g_0 = tl.zeros([16], tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=1):
        in_row = block * 16 + i < N
        node, is_live = block_nodes(order, ancestors, block * 16, N, W)
        in_k = in_row[:, None] & (d < K)[None, :]
        k = tl.load(key + node[:, None] * key_n + d[None, :], mask=in_k, other=0.0)
        q = tl.load(query + node[:, None] * query_n + d[None, :], mask=in_k, other=0.0)
        tile = in_v[:, None] & in_row[None, :]
        v = tl.load(value + node[None, :] * value_n + c[:, None], mask=tile, other=0.0).to(tl.float32)
        b = tl.load(beta + node * beta_n).to(tl.float32)
        g = path_decays(log_decay, log_decay_n, ancestors, node, N, W, COLUMNS)
        k_scale = inverse_norm(k, NORM_EPS)
        q_scale = inverse_norm(q, NORM_EPS) * SCALE
        b_scale = b * k_scale

        into = tl.exp(g)
        kS = exact_product(S, tl.trans(k), zero, PRECISION)
        qS = exact_product(S, tl.trans(q), zero, PRECISION)
        # Chosen, not multiplied: an inert node may hold NaN.
        R = tl.where(is_live[None, :], b[None, :] * v - (into * b_scale)[None, :] * kS, 0.0)
        o = tl.where(is_live[None, :], (into * q_scale)[None, :] * qS, 0.0)
        if BLOCKS > 1:
            if block > 0:
                GT, PT = block_products(
                    *(ancestors, node_0, is_live_0, k_0, k_scale_0, g_0),
                    *(node, is_live, k, q, b_scale, q_scale, g, False, W, PRECISION),
                )
                R = exact_product(U_0, -GT, R, SOLVE_PRECISION)
                o = exact_product(U_0, PT, o, SOLVE_PRECISION)
            for above in tl.range(1, tl.minimum(block, blocks), num_stages=1):
                node_i, is_live_i = block_nodes(order, ancestors, above * 16, N, W)
                k_i = tl.load(key + node_i[:, None] * key_n + d[None, :], mask=(d < K)[None, :], other=0.0)
                g_i = path_decays(log_decay, log_decay_n, ancestors, node_i, N, W, COLUMNS)
                GT, PT = block_products(
                    *(ancestors, node_i, is_live_i, k_i, inverse_norm(k_i, NORM_EPS), g_i),
                    *(node, is_live, k, q, b_scale, q_scale, g, False, W, PRECISION),
                )
                # Written by this program, and ordered by the barrier after the writing.
                U_i = tl.load(
                    pseudo_values + ((ib * N + node_i[None, :]) * HV + ih) * V + c[:, None], mask=in_v[:, None], other=0.0
                )
                R = exact_product(U_i, -GT, R, SOLVE_PRECISION)
                o = exact_product(U_i, PT, o, SOLVE_PRECISION)
        if BLOCKS == 1 or block < tl.maximum(blocks, 1):
            GT, PT = block_products(
                *(ancestors, node, is_live, k, k_scale, g, node, is_live, k, q, b_scale, q_scale, g, True, W, PRECISION)
            )
            R = solve_block(R, GT, height, SOLVE_PRECISION)
            o = exact_product(R, PT, o, SOLVE_PRECISION)
        else:
            qk = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * q_scale * k_scale
            o += tl.where(is_live, qk, 0.0)[None, :] * R
        if BLOCKS > 1:
            if block == 0:
                U_0, node_0, is_live_0, k_0, k_scale_0, g_0 = R, node, is_live, k, k_scale, g

        out = ((ib * N + node[None, :]) * HV + ih) * V + c[:, None]
        tl.store(output + out, o.to(output.dtype.element_ty), mask=tile)
        tl.store(pseudo_values + out, R, mask=tile)
        if iv == 0:
            tl.store(path_decay + (ib * N + node) * HV + ih, tl.where(is_live, g, 0.0), mask=in_row)
            if ih % GROUPS == 0:
                tl.store(key_scale + (ib * N + node) * HK + ik, tl.where(is_live, k_scale, 0.0), mask=in_row)
        if BLOCKS > 2:
            tl.debug_barrier()
