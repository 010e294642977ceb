"""The verify kernel's way for any number of nodes: blocks of 16 slots one after another, the state streamed for each.

    every block:  R -= G U_i, O += P U_i for each earlier block i of internal nodes;  then U = R + C R,  O += P U

Slots are positions in ``order``, internal nodes first, so that a block of leaves meets the internal blocks alone and its own C
is 0. Earlier U_i are read back from ``pseudo_values``, where the same program wrote them. The state comes from L2 but for the
first block; what is computed bounds this way, which trees of more than 64 nodes or 16 internal ones take.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product
from treewy_inductor.lowerings.tree_block_kernel import (
    inverse_correction,
    inverse_norm,
    is_above,
    load_rows,
    path_decays,
    raw_product,
    state_products,
)
from treewy_inductor.lowerings.trunk_kernel import load_trunk, state_products_below_trunk


@triton.jit
def decays_of_any_tree(
    log_decay,  # [N] at stride log_decay_n
    ancestors,  # [N, W] int64
    node,  # [16] int32
    N,
    log_decay_n: tl.constexpr,
    W: tl.constexpr,
):
    """Return ``g_t``, ``[16]`` float32."""
    g = tl.zeros([16], tl.float32)
    for w in tl.static_range(W):
        above = w * 64 + tl.arange(0, 64)
        log_a = tl.load(log_decay + above * log_decay_n, mask=above < N, other=0.0)
        g += path_decays(tl.load(ancestors + node * W + w), log_a)
    return g


@triton.jit
def decays_between(
    ancestors,  # [N, W] int64
    node,  # [16] int32
    is_live,  # [16] int1
    g,  # [16] float32
    node_i,  # [16] int32
    is_live_i,  # [16] int1
    g_i,  # [16] float32
    W: tl.constexpr,
):
    """Return whether i is t or above it, ``[16, 16]``, and ``exp(g_t - g_i)`` where it is, 1 elsewhere."""
    word = tl.load(ancestors + node[:, None] * W + node_i[None, :] // 64)
    A = is_above(word, node_i[None, :] % 64) & is_live[:, None] & is_live_i[None, :]
    return A, tl.exp(tl.where(A, g[:, None] - g_i[None, :], 0.0))


@triton.jit
def verify_by_blocks(
    query,  # [N, K] at stride query_n, of this row and head, as are the next four
    key,
    value,
    log_decay,
    beta,
    state,  # [K, V] at strides state_k, state_v, of this row and head
    ancestors,  # [N, W] int64, of this row
    order,  # [N] int32, of this row
    internal_nodes,
    height,
    trunk_keys,
    trunk_scale,
    trunk_values,
    trunk_decay,
    trunk_length,
    output,  # [N, HV, V] from this head on, as are the next two
    pseudo_values,
    path_decay,  # [N, HV]
    key_scale,  # [N, HK]
    N,
    ib,
    ih,
    iv,
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
    W: tl.constexpr,
    T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STREAM: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    """Write what the kernel writes, for one value head and block of value columns."""
    HV: tl.constexpr = HK * GROUPS
    i = tl.arange(0, 16)
    c = iv * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = c < V
    internal_blocks = tl.cdiv(internal_nodes, 16)
    for first in tl.range(0, N, 16, num_stages=1):
        in_row = first + i < N
        node = tl.load(order + first + i, mask=in_row, other=0)
        row = tl.arange(0, 32)
        row_node = tl.load(order + first + row % 16, mask=first + row % 16 < N, other=0)
        rows = tl.where(row < 16, key + row_node * key_n, query + row_node * query_n)
        tile = in_v[:, None] & in_row[None, :]
        k = load_rows(key + node * key_n, K, BLOCK_K)
        q = load_rows(query + node * query_n, K, BLOCK_K)
        v = tl.load(value + node[None, :] * value_n + c[:, None], mask=tile, other=0.0)
        b = tl.load(beta + node * beta_n).to(tl.float32)
        g = decays_of_any_tree(log_decay, ancestors, node, N, log_decay_n, W)
        # An inert node is nobody's ancestor, not even its own.
        is_live = is_above(tl.load(ancestors + node * W + node // 64), node % 64) & in_row
        k_scale = inverse_norm(k, NORM_EPS)
        q_scale = inverse_norm(q, NORM_EPS) * SCALE
        A, D = decays_between(ancestors, node, is_live, g, node, is_live, g, W)
        D *= k_scale[None, :]
        # Chosen, not multiplied, here and below: an inert node may hold NaN.
        G = tl.where(A & (i[:, None] != i[None, :]), raw_product(k, k, PRECISION) * D * (b * k_scale)[:, None], 0.0)
        P = tl.where(A, raw_product(q, k, PRECISION) * D * q_scale[:, None], 0.0)
        C = inverse_correction(G, height, SOLVE_PRECISION)
        if T > 0:
            length = tl.load(trunk_length + ib)
            k_j, weight, u_j, end = load_trunk(
                *(trunk_keys, trunk_scale, trunk_values, trunk_decay, length, 0, ib, ih, c),
                *(T, HK, GROUPS, K, V, BLOCK_K),
            )
            kS, qS = state_products_below_trunk(
                *(state, rows, c, k_j, weight, u_j, end),
                *(trunk_keys, trunk_scale, trunk_values, trunk_decay, length, ib, ih),
                *(state_k, state_v, T, HK, GROUPS, K, V),
                *(BLOCK_V, BLOCK_K, STREAM, STAGES, PRECISION, SOLVE_PRECISION),
            )
        else:
            kS, qS = state_products(
                *(state, rows, c),
                *(state_k, state_v, K, V, BLOCK_V, BLOCK_K, STREAM, STAGES, PRECISION),
            )
        R = tl.where(is_live[None, :], b[None, :] * v.to(tl.float32) - (tl.exp(g) * b * k_scale)[None, :] * kS, 0.0)
        o = tl.where(is_live[None, :], (tl.exp(g) * q_scale)[None, :] * qS, 0.0)
        for above in tl.range(0, tl.minimum(internal_blocks, first // 16), num_stages=1):
            node_i = tl.load(order + above * 16 + i)
            k_i = load_rows(key + node_i * key_n, K, BLOCK_K)
            # Written by this program for an earlier block, before the barrier below.
            U_i = tl.load(pseudo_values + node_i[None, :] * (HV * V) + c[:, None], mask=in_v[:, None], other=0.0)
            g_i = decays_of_any_tree(log_decay, ancestors, node_i, N, log_decay_n, W)
            is_live_i = is_above(tl.load(ancestors + node_i * W + node_i // 64), node_i % 64)
            A, D = decays_between(ancestors, node, is_live, g, node_i, is_live_i, g_i, W)
            D *= inverse_norm(k_i, NORM_EPS)[None, :]
            G_i = tl.where(A, raw_product(k, k_i, PRECISION) * D * -(b * k_scale)[:, None], 0.0)
            P_i = tl.where(A, raw_product(q, k_i, PRECISION) * D * q_scale[:, None], 0.0)
            R = exact_product(U_i, tl.trans(G_i), R, SOLVE_PRECISION)
            o = exact_product(U_i, tl.trans(P_i), o, SOLVE_PRECISION)
        R = exact_product(R, tl.trans(C), R, SOLVE_PRECISION)
        o = exact_product(R, tl.trans(P), o, SOLVE_PRECISION)
        out = node[None, :] * (HV * V) + c[:, None]
        tl.store(output + out, o.to(output.dtype.element_ty), mask=tile)
        tl.store(pseudo_values + out, R, mask=tile)
        if iv == 0:
            tl.store(path_decay + node * HV, tl.where(is_live, g, 0.0), mask=in_row)
            if ih % GROUPS == 0:
                tl.store(key_scale + node * HK, tl.where(is_live, k_scale, 0.0), mask=in_row)
        tl.debug_barrier()
