"""The verify kernel's way for at most 16 nodes: one block, solved before the state arrives and applied to it in one product.

    [U | O] = [R | exp(g) S^T q] + R X           block_operators_kernel.py says what X and R are

The state comes in tiles of BLOCK_V value columns with all their keys, which lie in memory as one piece; keys and queries stay
in shared memory.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.block_operators_kernel import operators_of_block, store_results
from treewy_inductor.lowerings.exact_product_kernel import product_from_registers
from treewy_inductor.lowerings.fetch_ahead_kernel import fetch_into_l2
from treewy_inductor.lowerings.half_tile_kernel import (
    half_tile,
    inverse_norm_of_halves,
    load_half_rows,
    load_values,
)
from treewy_inductor.lowerings.tree_block_kernel import is_above, solve
from treewy_inductor.lowerings.trunk_kernel import add_trunk_to_tile


@triton.jit
def verify_one_block(
    query,  # [N, K] at stride query_n, of this row and key head, as is the next
    key,
    value,  # [N, V] at stride value_n, of this row and value head, as are the next three
    log_decay,
    beta,
    state,
    ancestors,  # [N] int64, of this row
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
    slot = tl.arange(0, 16)
    node = tl.minimum(slot, N - 1)
    t = tl.arange(0, 32)
    is_key = t < 16
    node_t = tl.minimum(t % 16, N - 1)
    in_row = t % 16 < N
    # All loads of what is small come before all products: one wait for memory, not one a step.
    word = tl.load(ancestors + node_t, mask=in_row, other=0)
    b = tl.load(beta + node_t * beta_n, mask=in_row & is_key, other=0.0).to(tl.float32)
    log_a = tl.load(log_decay + node * log_decay_n, mask=slot < N, other=0.0).to(tl.float32)
    is_live_i = is_above(tl.load(ancestors + node, mask=slot < N, other=0), slot)
    x0 = load_half_rows(tl.where(is_key, key + node_t * key_n, query + node_t * query_n), 0, K, BLOCK_K)
    x1 = load_half_rows(tl.where(is_key, key + node_t * key_n, query + node_t * query_n), 1, K, BLOCK_K)
    k0 = load_half_rows(key + node * key_n, 0, K, BLOCK_K)
    k1 = load_half_rows(key + node * key_n, 1, K, BLOCK_K)
    if IS_FETCHED:
        fetch_into_l2(state + part_0 * BLOCK_V * state_v, path_decay, BLOCK_V * K)
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
        fetch_into_l2(state + (part_0 + 1) * BLOCK_V * state_v, path_decay, BLOCK_V * K)

    for part in tl.range(0, PARTS, num_stages=STAGES):
        c = (part_0 + part) * BLOCK_V + tl.arange(0, BLOCK_V)
        S = half_tile(state, c, 0, state_k, state_v, K, V, BLOCK_V, BLOCK_K)
        # Chosen once more, so that values pass through registers as the state does.
        v = tl.where(is_live_i[:, None], load_values(value + node * value_n, c, is_live_i, V), 0.0)
        xS = product_from_registers(S, tl.trans(x0), tl.zeros([BLOCK_V, 32], tl.float32), PRECISION)
        S = half_tile(state, c, 1, state_k, state_v, K, V, BLOCK_V, BLOCK_K)
        xS = product_from_registers(S, tl.trans(x1), xS, PRECISION)
        if T > 0:
            xS = add_trunk_to_tile(
                *(xS, x0, x1, trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length, ib, ih, c),
                *(T, HK, GROUPS, K, V, BLOCK_K, PRECISION, SOLVE_PRECISION),
            )
        store_results(
            *(xS, of_xS, v, b, X, pseudo_values, output, node, c, N, HV, V),
            *(SOLVE_PRECISION, VALUE_TERMS, VALUE_PRECISION),
        )
