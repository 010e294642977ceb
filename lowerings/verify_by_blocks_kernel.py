"""The way for any number of nodes: blocks of 32 slots one after another, the state streamed for each.

    every block:  [U | O] = [R | exp(g) S^T q] + sum of X_i U_i over earlier blocks i of internal nodes,  X_i = [-G | P]
    then          [U | O] += X (I - L)^-1 U  with its own X, whose upper half is L

Slots are positions in ``order``, internal nodes first, so that a block of leaves meets the internal blocks alone and its own L
is 0. Rows are keys of 32 slots, then their queries: the 64 rows of the matrix unit. Nothing is held that can be read again:
products of keys are made in steps of the key dimension, U_i, path decays and key scales come back from where the same program
wrote them. The state comes from L2 but for the first block.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product
from treewy_inductor.lowerings.row_products_kernel import (
    above_block,
    decays_of_any_tree,
    first_rows,
    solve_rows,
    state_products_of_rows,
)
from treewy_inductor.lowerings.tree_block_kernel import is_above
from treewy_inductor.lowerings.trunk_kernel import add_trunk_to_rows, trunk_end


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
    key_end,  # int32 scalar, BLOCK_K
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
    t = tl.arange(0, 64)
    i = tl.arange(0, 32)
    is_key = t < 32
    c = iv * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = c < V
    internal_blocks = tl.cdiv(internal_nodes, 32)
    for first in tl.range(0, N, 32, num_stages=1):
        slot = first + t % 32
        node = tl.load(order + slot, mask=slot < N, other=0)
        rows = tl.where(is_key, key + node * key_n, query + node * query_n)
        # An inert node is nobody's ancestor, not even its own.
        is_live = is_above(tl.load(ancestors + node * W + node // 64), node % 64) & (slot < N)
        g = tl.where(is_live, decays_of_any_tree(log_decay, ancestors, node, N, log_decay_n, W), 0.0)
        R, x_scale = state_products_of_rows(
            *(state, rows, c, key_end, state_k, state_v, K, V, BLOCK_V, BLOCK_K, STREAM, STAGES, NORM_EPS, PRECISION)
        )
        if T > 0:
            length = tl.load(trunk_length + ib)
            R *= tl.exp(trunk_end(trunk_decay, length, ib, ih, T, HV))
            for start in tl.range(0, length, 16, num_stages=1):
                R = add_trunk_to_rows(
                    *(R, rows, trunk_keys, trunk_scale, trunk_values, trunk_decay, length, start, ib, ih, c, key_end),
                    *(T, HK, GROUPS, K, V, BLOCK_K, STREAM, PRECISION, SOLVE_PRECISION),
                )
        # Written by every program of the head, the same bits: each reads back what it wrote itself.
        tl.store(path_decay + node * HV, g, mask=(slot < N) & is_key)
        tl.store(key_scale + node * HK, tl.where(is_live, x_scale, 0.0), mask=(slot < N) & is_key)
        tl.debug_barrier()
        b = tl.where(is_live & is_key, tl.load(beta + node * beta_n).to(tl.float32), 0.0)
        of_raw = x_scale * tl.where(is_key, -b, SCALE)
        v = tl.load(value + node[:, None] * value_n + c[None, :], mask=(is_live & is_key)[:, None] & in_v[None, :], other=0.0)
        # Chosen, not multiplied, here and below: an inert node may hold NaN.
        R = tl.where(is_live[:, None], (tl.exp(g) * of_raw)[:, None] * R, 0.0) + b[:, None] * v.to(tl.float32)
        for above in tl.range(0, tl.minimum(internal_blocks, first // 32), num_stages=1):
            node_i = tl.load(order + above * 32 + i)
            X = above_block(
                *(rows, node, is_live, g, of_raw, node_i, key + node_i * key_n, ancestors, path_decay, key_scale, key_end),
                *(W, HK, HV, K, BLOCK_K, STREAM, PRECISION),
            )
            # Written by this program for an earlier block, before the barrier below.
            U_i = tl.load(pseudo_values + node_i[:, None] * (HV * V) + c[None, :], mask=in_v[None, :], other=0.0)
            R = exact_product(X, U_i, R, SOLVE_PRECISION)
        node_i = tl.load(order + first + i, mask=first + i < N, other=0)
        X = above_block(
            *(rows, node, is_live, g, of_raw, node_i, key + node_i * key_n, ancestors, path_decay, key_scale, key_end),
            *(W, HK, HV, K, BLOCK_K, STREAM, PRECISION),
        )
        # No slot is t for queries: their own term stays.
        X = tl.where((first + i < N)[None, :] & (i[None, :] != t[:, None]), X, 0.0)
        X = solve_rows(X, tl.where(first < internal_nodes, height, 0), SOLVE_PRECISION)
        R = exact_product(X, first_rows(R), R, SOLVE_PRECISION)
        cells = node[:, None] * (HV * V) + c[None, :]
        tile = (slot < N)[:, None] & in_v[None, :]
        tl.store(pseudo_values + cells, R, mask=tile & is_key[:, None])
        tl.store(output + cells, R.to(output.dtype.element_ty), mask=tile & (t >= 32)[:, None])
        tl.debug_barrier()
