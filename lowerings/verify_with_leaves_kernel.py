"""The verify kernel's way for 17 to 64 nodes of which at most 16 are internal: one block to solve, the rest leaves.

    block      U = R + C R,  O = exp(g) S^T q + P U
    leaves     U_l = R_l - G_l U,  O_l = exp(g_l) S^T q_l + P_l U + (q_l . k_l) U_l

Slots are positions in ``order``: the first 16 hold all internal nodes, and nobody descends from what is in a later slot. All
operators are made transposed, ancestor i along the first axis and node t along the second, as the products read them. The
state is streamed once, each step of it multiplied with the rows of both blocks while it is in registers.
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
    load_once,
    load_rows,
    products_with_step,
    raw_product,
    state_step,
)
from treewy_inductor.lowerings.trunk_kernel import add_trunk, load_trunk, trunk_end


@triton.jit
def verify_with_leaves(
    query,  # [N, K] at stride query_n, of this row and key head, as is the next
    key,
    value,  # [N, HEADS, V] at strides value_n and value_h, of this row from the first head on, as are the next three
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
    output,  # [N, HV, V] of this row from the first head on, as are the next two
    pseudo_values,
    path_decay,  # [N, HV]
    key_scale,  # [N, HK], of this row and key head
    N,
    ib,
    ih_0,
    part_0,
    is_first,  # of the programs of this row and key head
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
    T: tl.constexpr,
    LEAVES: tl.constexpr,  # slots after the first 16, a power of two
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STREAM: tl.constexpr,
    STAGES: tl.constexpr,
    IS_FETCHED: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    """Write what the kernel writes, for HEADS value heads and PARTS blocks of their value columns."""
    HV: tl.constexpr = HK * GROUPS
    i = tl.arange(0, 16)
    slot = 16 + tl.arange(0, LEAVES)
    in_row = slot < N
    node_i = tl.load(order + i)
    node_l = tl.load(order + slot, mask=in_row, other=0)
    row = tl.arange(0, 32)
    row_i = tl.load(order + row % 16)
    rows_i = tl.where(row < 16, key + row_i * key_n, query + row_i * query_n)
    row = tl.arange(0, 32)
    row_l = tl.load(order + 16 + row % LEAVES, mask=16 + row % LEAVES < N, other=0)
    rows_l = tl.where(row < LEAVES, key + row_l * key_n, query + row_l * query_n)
    # All loads of what is small come before all products: one wait for memory, not one a step.
    word_i = load_once(ancestors + node_i, i < N)
    word_l = load_once(ancestors + node_l, in_row)
    k_i = load_rows(key, key_n, node_i, K, BLOCK_K)
    q_i = load_rows(query, query_n, node_i, K, BLOCK_K)
    k_l = load_rows(key, key_n, node_l, K, BLOCK_K)
    q_l = load_rows(query, query_n, node_l, K, BLOCK_K)
    # An inert node is nobody's ancestor, not even its own.
    is_live_i = is_above(word_i, node_i)
    is_live_l = is_above(word_l, node_l) & in_row
    k_scale_i = inverse_norm(k_i, NORM_EPS)
    q_scale_i = inverse_norm(q_i, NORM_EPS) * SCALE
    k_scale_l = inverse_norm(k_l, NORM_EPS)
    q_scale_l = inverse_norm(q_l, NORM_EPS) * SCALE
    A_i = is_above(word_i[None, :], node_i[:, None]) & is_live_i[None, :] & is_live_i[:, None]
    A_l = is_above(word_l[None, :], node_i[:, None]) & is_live_l[None, :] & is_live_i[:, None]
    own = tl.where(is_live_l, tl.sum(k_l.to(tl.float32) * q_l.to(tl.float32), 1) * k_scale_l * q_scale_l, 0.0)
    KK_i = raw_product(k_i, k_i, PRECISION)
    KQ_i = raw_product(k_i, q_i, PRECISION)
    KK_l = raw_product(k_i, k_l, PRECISION)
    KQ_l = raw_product(k_i, q_l, PRECISION)
    if is_first:
        tl.store(key_scale + node_i * HK, tl.where(is_live_i, k_scale_i, 0.0))
        tl.store(key_scale + node_l * HK, tl.where(is_live_l, k_scale_l, 0.0), mask=in_row)

    for head in tl.range(0, HEADS, num_stages=1):
        log_a_i = load_once(log_decay + head * log_decay_h + node_i * log_decay_n, i < N).to(tl.float32)
        log_a_l = load_once(log_decay + head * log_decay_h + node_l * log_decay_n, in_row).to(tl.float32)
        # Chosen, not multiplied, here and below: an inert node may hold NaN.
        b_i = tl.where(is_live_i, load_once(beta + head * beta_h + node_i * beta_n, i < N).to(tl.float32), 0.0)
        b_l = tl.where(is_live_l, load_once(beta + head * beta_h + node_l * beta_n, in_row).to(tl.float32), 0.0)
        g_i = tl.sum(tl.where(A_i, log_a_i[:, None], 0.0), 0)
        g_l = tl.sum(tl.where(A_l, log_a_i[:, None], 0.0), 0) + tl.where(is_live_l, log_a_l, 0.0)
        D_i = tl.exp(tl.where(A_i, g_i[None, :] - g_i[:, None], 0.0)) * k_scale_i[:, None]
        D_l = tl.exp(tl.where(A_l, g_l[None, :] - g_i[:, None], 0.0)) * k_scale_i[:, None]
        G_i = tl.where(A_i & (i[:, None] != i[None, :]), KK_i * D_i * (b_i * k_scale_i)[None, :], 0.0)
        C = inverse_correction(G_i, height, SOLVE_PRECISION)
        P_i = tl.where(A_i, KQ_i * D_i * q_scale_i[None, :], 0.0)
        G_l = tl.where(A_l, KK_l * D_l * (-b_l * k_scale_l)[None, :], 0.0)
        P_l = tl.where(A_l, KQ_l * D_l * q_scale_l[None, :], 0.0)
        if part_0 == 0:
            tl.store(path_decay + node_i * HV + head, g_i)
            tl.store(path_decay + node_l * HV + head, g_l, mask=in_row)
        of_kS_i = tl.exp(g_i) * b_i * k_scale_i
        of_kS_l = tl.exp(g_l) * b_l * k_scale_l
        of_qS_i = tl.where(is_live_i, tl.exp(g_i) * q_scale_i, 0.0)
        of_qS_l = tl.where(is_live_l, tl.exp(g_l) * q_scale_l, 0.0)

        for part in tl.range(0, PARTS, num_stages=1):
            c = (part_0 + part) * BLOCK_V + tl.arange(0, BLOCK_V)
            in_v = c < V
            v_i = tl.load(value + head * value_h + node_i[None, :] * value_n + c[:, None], mask=in_v[:, None], other=0.0)
            tile = in_v[:, None] & in_row[None, :]
            v_l = tl.load(value + head * value_h + node_l[None, :] * value_n + c[:, None], mask=tile, other=0.0)
            if IS_FETCHED and HEADS * PARTS > 1:
                later = tl.minimum(head * PARTS + part + 1, HEADS * PARTS - 1)
                column = (part_0 + later % PARTS) * BLOCK_V
                fetch_into_l2(state + later // PARTS * state_h + column * state_v, path_decay, BLOCK_V * K)
            with_i = tl.zeros([BLOCK_V, 32], tl.float32)
            # All products 32 columns wide, as far as leaves allow: the state is split once for products of one width.
            with_l = tl.zeros([BLOCK_V, 32], tl.float32)
            kS_l = tl.zeros([BLOCK_V, LEAVES], tl.float32)
            qS_l = tl.zeros([BLOCK_V, LEAVES], tl.float32)
            if T > 0:
                length = tl.load(trunk_length + ib)
                for start in tl.range(0, length, 16, num_stages=1):
                    k_j, weight, u_j, _ = load_trunk(
                        *(trunk_keys, trunk_scale, trunk_values, trunk_decay, length, start, ib, ih_0 + head, c),
                        *(T, HK, GROUPS, K, V, BLOCK_K),
                    )
                    with_i = add_trunk(with_i, rows_i, k_j, weight, u_j, K, BLOCK_K, PRECISION, SOLVE_PRECISION)
                    if LEAVES == 16:
                        with_l = add_trunk(with_l, rows_l, k_j, weight, u_j, K, BLOCK_K, PRECISION, SOLVE_PRECISION)
                    else:
                        k_rows, q_rows = key + node_l * key_n, query + node_l * query_n
                        kS_l = add_trunk(kS_l, k_rows, k_j, weight, u_j, K, BLOCK_K, PRECISION, SOLVE_PRECISION)
                        qS_l = add_trunk(qS_l, q_rows, k_j, weight, u_j, K, BLOCK_K, PRECISION, SOLVE_PRECISION)
                decay = tl.exp(trunk_end(trunk_decay, length, ib, ih_0 + head, T, HV))
            for start in tl.range(0, BLOCK_K, STREAM, num_stages=STAGES):
                S = state_step(state + head * state_h, c, start, state_k, state_v, K, V, BLOCK_V, BLOCK_K, STREAM)
                if T > 0:
                    S = S.to(tl.float32) * decay
                with_i = products_with_step(S, rows_i, start, with_i, K, BLOCK_K, STREAM, PRECISION)
                if LEAVES == 16:
                    with_l = products_with_step(S, rows_l, start, with_l, K, BLOCK_K, STREAM, PRECISION)
                else:
                    kS_l = products_with_step(S, key + node_l * key_n, start, kS_l, K, BLOCK_K, STREAM, PRECISION)
                    qS_l = products_with_step(S, query + node_l * query_n, start, qS_l, K, BLOCK_K, STREAM, PRECISION)
            kS_i, qS_i = columns(with_i, 0, 16), columns(with_i, 1, 16)
            if LEAVES == 16:
                kS_l, qS_l = columns(with_l, 0, 16), columns(with_l, 1, 16)
            # Read again: kept from above, and in every layout, they would cost registers while the state is streamed.
            node_i = tl.load(order + i)
            node_l = tl.load(order + slot, mask=in_row, other=0)
            R = tl.where((b_i != 0.0)[None, :], b_i[None, :] * v_i.to(tl.float32) - of_kS_i[None, :] * kS_i, 0.0)
            U = exact_product(R, C, R, SOLVE_PRECISION)
            o = tl.where((of_qS_i != 0.0)[None, :], of_qS_i[None, :] * qS_i, 0.0)
            o = exact_product(U, P_i, o, SOLVE_PRECISION)
            out = node_i[None, :] * (HV * V) + head * V + c[:, None]
            tl.store(pseudo_values + out, U, mask=in_v[:, None])
            tl.store(output + out, o.to(output.dtype.element_ty), mask=in_v[:, None])
            R = tl.where((b_l != 0.0)[None, :], b_l[None, :] * v_l.to(tl.float32) - of_kS_l[None, :] * kS_l, 0.0)
            R = exact_product(U, G_l, R, SOLVE_PRECISION)
            o = tl.where((of_qS_l != 0.0)[None, :], of_qS_l[None, :] * qS_l, 0.0)
            o = exact_product(U, P_l, o, SOLVE_PRECISION) + own[None, :] * R
            out = node_l[None, :] * (HV * V) + head * V + c[:, None]
            tl.store(pseudo_values + out, R, mask=tile)
            tl.store(output + out, o.to(output.dtype.element_ty), mask=tile)
