"""The verify kernel's way for 17 to 64 nodes of which at most 16 are internal: one block to solve, the rest leaves.

Slots are positions in ``order``: the first 16 hold all internal nodes, and nobody descends from what is in a later slot.
leaf_operators_kernel.py makes what stands before and behind the products with the state. The state comes in tiles of BLOCK_V
value columns with all their keys, in two halves, each split once and multiplied with the rows of both blocks.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product, product_of_terms, terms_in_registers
from treewy_inductor.lowerings.fetch_ahead_kernel import fetch_into_l2
from treewy_inductor.lowerings.half_tile_kernel import add_scaled_values
from treewy_inductor.lowerings.leaf_operators_kernel import load_rows_of_nodes, operators_with_leaves
from treewy_inductor.lowerings.tree_block_kernel import columns, is_above
from treewy_inductor.lowerings.trunk_kernel import add_trunk_to_tile


@triton.jit
def half_of_tile(
    state,  # [K, V] at strides state_k, state_v, of this head
    start,  # first value column
    half: tl.constexpr,
    state_k: tl.constexpr,
    state_v: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the first or second half of the keys of BLOCK_V columns, transposed: ``[BLOCK_V, BLOCK_K / 2]``."""
    c = start + tl.arange(0, BLOCK_V)
    # As a part of the address, which costs less than of the range.
    first = half * (BLOCK_K // 2)
    state += first * state_k
    e = tl.arange(0, BLOCK_K // 2)
    if BLOCK_K == K and V % BLOCK_V == 0:
        S = tl.load(state + c[:, None] * state_v + e[None, :] * state_k)
    else:
        in_state = (c < V)[:, None] & (first + e < K)[None, :]
        S = tl.load(state + c[:, None] * state_v + e[None, :] * state_k, mask=in_state, other=0.0)
    return S


@triton.jit
def live_values(
    value,  # [N, V] at stride value_n
    node,  # [M] int32
    is_live,  # [M] int1
    c,  # [BLOCK_V] int32, value columns
    value_n: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Return those columns of the nodes' values, ``[M, BLOCK_V]``, 0 of inert nodes."""
    if V % BLOCK_V == 0:
        v = tl.load(value + node[:, None] * value_n + c[None, :])
    else:
        v = tl.load(value + node[:, None] * value_n + c[None, :], mask=(c < V)[None, :], other=0.0)
    # Chosen after the load: a masked one would take two buffers of shared memory, which is what bounds programs here.
    return tl.where(is_live[:, None], v, 0.0).to(value.dtype.element_ty)


@triton.jit
def store_nodes(
    tensor,  # [N, HV, V] from this head on
    tile,  # [BLOCK_V, M] float32
    node,  # [M] int32
    in_row,  # [M] int1
    c,  # [BLOCK_V] int32, value columns
    HV: tl.constexpr,
    V: tl.constexpr,
):
    """Write the nodes' columns."""
    mask = (c < V)[:, None] & in_row[None, :]
    tl.store(tensor + node[None, :] * (HV * V) + c[:, None], tile.to(tensor.dtype.element_ty), mask=mask)


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
    node = tl.load(order + tl.arange(0, 16))
    t = tl.arange(0, 32)
    is_key = t < 16
    node_t = tl.load(order + t % 16)
    leaf = 16 + tl.arange(0, LEAVES)
    in_row = leaf < N
    node_l = tl.load(order + leaf, mask=in_row, other=0)
    s = 16 + tl.arange(0, 2 * LEAVES) % LEAVES
    node_s = tl.load(order + s, mask=s < N, other=0)
    word = tl.load(ancestors + node)
    word_t = tl.load(ancestors + node_t)
    word_l = tl.load(ancestors + node_l, mask=in_row, other=0)
    word_s = tl.load(ancestors + node_s, mask=s < N, other=0)
    b = tl.load(beta + node_t * beta_n).to(tl.float32)
    b_l = tl.load(beta + node_l * beta_n).to(tl.float32)
    log_a = tl.load(log_decay + node * log_decay_n).to(tl.float32)
    log_a_l = tl.load(log_decay + node_l * log_decay_n).to(tl.float32)
    # An inert node is nobody's ancestor, not even its own.
    is_live_i = is_above(word, node)
    is_live = is_above(word_t, node_t)
    is_live_l = is_above(word_l, node_l)
    # An inert node may hold NaN: rows of the first slot, live in every row that has a live node, stand in for its own.
    first = tl.load(order)
    x0, x1, x, k, y0, y1 = load_rows_of_nodes(
        *(query, key, tl.where(is_live_i, node, first), tl.where(is_live, node_t, first)),
        *(tl.where(is_above(word_s, node_s), node_s, first), query_n, key_n, K, BLOCK_K, IS_FETCHED),
    )
    if IS_FETCHED:
        fetch_into_l2(state + part_0 * BLOCK_V * state_v, path_decay, BLOCK_V * K)
    b_l = tl.where(is_live_l, b_l, 0.0)
    X, Z, of_x, of_y, own, g, g_l, x_scale, k_scale_l = operators_with_leaves(
        *(x0, x1, x, k, y0, y1, node, word_t, word_l, is_live, is_live_l, log_a, log_a_l, b, b_l),
        *(height, SCALE, NORM_EPS, PRECISION, SOLVE_PRECISION),
    )
    b = tl.where(is_live & is_key, b, 0.0)
    if part_0 == 0:
        tl.store(path_decay + node_t * HV, g, mask=is_key)
        tl.store(path_decay + node_l * HV, g_l, mask=in_row)
        if ih % GROUPS == 0:
            tl.store(key_scale + node_t * HK, tl.where(is_live, x_scale, 0.0), mask=is_key)
            tl.store(key_scale + node_l * HK, tl.where(is_live_l, k_scale_l, 0.0), mask=in_row)
    if IS_FETCHED and PARTS > 1:
        fetch_into_l2(state + (part_0 + 1) * BLOCK_V * state_v, path_decay, BLOCK_V * K)

    is_slot = tl.full([16], True, tl.int1)
    if is_above(tl.load(ancestors + first), first):
        for part in tl.range(0, PARTS, num_stages=STAGES):
            start = (part_0 + part) * BLOCK_V
            c = start + tl.arange(0, BLOCK_V)
            xS = tl.zeros([BLOCK_V, 32], tl.float32)
            yS = tl.zeros([BLOCK_V, 2 * LEAVES], tl.float32)
            S = half_of_tile(state, start, 0, state_k, state_v, K, V, BLOCK_V, BLOCK_K)
            hi, lo = terms_in_registers(S, PRECISION)
            xS = product_of_terms(hi, lo, S.dtype, tl.trans(x0), xS, PRECISION)
            yS = product_of_terms(hi, lo, S.dtype, y0, yS, PRECISION)
            v = live_values(value, node, is_live_i, c, value_n, V, BLOCK_V)
            v_l = live_values(value, node_l, is_live_l, c, value_n, V, BLOCK_V)
            S = half_of_tile(state, start, 1, state_k, state_v, K, V, BLOCK_V, BLOCK_K)
            hi, lo = terms_in_registers(S, PRECISION)
            xS = product_of_terms(hi, lo, S.dtype, tl.trans(x1), xS, PRECISION)
            yS = product_of_terms(hi, lo, S.dtype, y1, yS, PRECISION)
            if T > 0:
                xS = add_trunk_to_tile(
                    *(xS, x0, x1, trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length, ib, ih, c),
                    *(T, HK, GROUPS, K, V, BLOCK_K, PRECISION, SOLVE_PRECISION),
                )
                yS = add_trunk_to_tile(
                    *(yS, tl.trans(y0), tl.trans(y1), trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length),
                    *(ib, ih, c, T, HK, GROUPS, K, V, BLOCK_K, PRECISION, SOLVE_PRECISION),
                )
            # Always so, but the compiler sees it vary with the tile and keeps these in registers from here on only.
            is_tile = part < PARTS
            xS *= tl.where(is_tile, of_x, 0.0)[None, :]
            yS *= tl.where(is_tile, of_y, 0.0)[None, :]
            xS = add_scaled_values(xS, v, b, VALUE_TERMS, VALUE_PRECISION)
            xS = exact_product(columns(xS, 0), X, xS, SOLVE_PRECISION)
            U = columns(xS, 0)
            yS = exact_product(U, Z, yS, SOLVE_PRECISION)
            store_nodes(pseudo_values, U, node, is_slot, c, HV, V)
            store_nodes(output, columns(xS, 1), node, is_slot, c, HV, V)
            U_l = add_scaled_values(columns(yS, 0), v_l, b_l, VALUE_TERMS, VALUE_PRECISION)
            store_nodes(pseudo_values, U_l, node_l, in_row, c, HV, V)
            store_nodes(output, columns(yS, 1) + tl.where(is_tile, own, 0.0)[None, :] * U_l, node_l, in_row, c, HV, V)
    else:
        # No node is live, and whatever multiplies NaN is NaN.
        for part in tl.range(0, PARTS, num_stages=1):
            c = (part_0 + part) * BLOCK_V + tl.arange(0, BLOCK_V)
            zeros = tl.zeros([BLOCK_V, LEAVES], tl.float32)
            store_nodes(pseudo_values, zeros, node_l, in_row, c, HV, V)
            store_nodes(output, zeros, node_l, in_row, c, HV, V)
            zeros = tl.zeros([BLOCK_V, 16], tl.float32)
            store_nodes(pseudo_values, zeros, node, is_slot, c, HV, V)
            store_nodes(output, zeros, node, is_slot, c, HV, V)
