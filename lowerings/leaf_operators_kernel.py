"""What a tree of 16 internal nodes and leaves does to products with the state, made once a value head before any state comes.

    block      [U | O] = [R | exp(g) S^T q] + R X,  X = (I - L)^-1 [L | P],  L = -G
    leaves     [U_l | O_l] = [R_l | exp(g) S^T q_l] + U [-G_l | P_l],  O_l += (q_l . k_l) U_l

All is made transposed, ancestor i along the first axis and node t along the second, as the products read it. Rows of keys and
queries all are asked for before any is used: what multiplies matrices waits for each of its operands where it is loaded.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product
from treewy_inductor.lowerings.half_tile_kernel import inverse_norm_of_halves, load_half_rows, raw_product_of_halves
from treewy_inductor.lowerings.row_products_kernel import step_of_rows
from treewy_inductor.lowerings.tree_block_kernel import columns, first_half, halves, is_above, solve


@triton.jit
def beside(
    a,  # [..., M]
    b,  # [..., M]
):
    """Return the elements of ``a``, then those of ``b``, along the last axis: ``[2 M]`` or ``[C, 2 M]``."""
    if len(a.shape) == 1:
        both = tl.reshape(tl.permute(tl.join(a, b), [1, 0]), [2 * a.shape[0]])
    else:
        both = tl.reshape(tl.permute(tl.join(a, b), [0, 2, 1]), [a.shape[0], 2 * a.shape[1]])
    return both


@triton.jit
def after_loads(
    x,  # 16-bit numbers, or any where IS_CUDA is not set
    IS_CUDA: tl.constexpr,
):
    """Return ``x``: no instruction, but the compiler stores it in shared memory here and not where it was loaded."""
    if IS_CUDA and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=True, pack=2)
    return x


@triton.jit
def load_half_columns(
    rows,  # [M] pointers to rows of K elements, stride 1
    half: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the first or second half of the rows, transposed: ``[BLOCK_K / 2, M]``, 0 past ``K``."""
    d = half * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    if BLOCK_K == K:
        x = tl.load(rows[None, :] + d[:, None])
    else:
        x = tl.load(rows[None, :] + d[:, None], mask=(d < K)[:, None], other=0.0)
    return x


@triton.jit
def own_products(
    y0,  # [BLOCK_K / 2, 2 M] float, M raw keys, then their queries, first halves
    y1,  # second halves
):
    """Return each query's product with its own key, ``[M]`` float32."""
    k0 = columns(y0, 0).to(tl.float32)
    k1 = columns(y1, 0).to(tl.float32)
    return tl.sum(k0 * columns(y0, 1).to(tl.float32) + k1 * columns(y1, 1).to(tl.float32), 0)


@triton.jit
def load_rows_of_nodes(
    query,  # [N, K] at stride query_n, of this row and key head, as is the next
    key,
    node,  # [16] int32, of live nodes in place of inert ones
    node_t,  # [32] int32, those twice
    node_s,  # [2 LEAVES] int32, leaves twice, as live
    query_n: tl.constexpr,
    key_n: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CUDA: tl.constexpr,
):
    """Return internal keys and queries in halves and whole, those keys whole, and leaves' keys and queries in halves."""
    of_inner = tl.where(tl.arange(0, 32) < 16, key + node_t * key_n, query + node_t * query_n)
    s = tl.arange(0, node_s.shape[0])
    of_leaves = tl.where(s < node_s.shape[0] // 2, key + node_s * key_n, query + node_s * query_n)
    x0 = load_half_rows(of_inner, 0, K, BLOCK_K)
    x1 = load_half_rows(of_inner, 1, K, BLOCK_K)
    # Transposed, since loads of one shape and order get one layout, and the state's of float32 would read half sectors by it.
    y0 = load_half_columns(of_leaves, 0, K, BLOCK_K)
    y1 = load_half_columns(of_leaves, 1, K, BLOCK_K)
    # Whole for the products of 16 rows, whose operands are waited for at once; from the first cache.
    x = step_of_rows(of_inner, 0, K, BLOCK_K, BLOCK_K)
    k = step_of_rows(key + node * key_n, 0, K, BLOCK_K, BLOCK_K)
    return after_loads(x0, IS_CUDA), after_loads(x1, IS_CUDA), x, k, y0, y1


@triton.jit
def operators_with_leaves(
    x0,  # [32, BLOCK_K / 2] float, raw keys and then queries of internal slots, first halves
    x1,  # second halves
    x,  # [32, BLOCK_K] float, both
    k,  # [16, BLOCK_K] float, the keys
    y0,  # [BLOCK_K / 2, 2 LEAVES] float, raw keys and then queries of leaves, first halves
    y1,  # second halves
    node,  # [16] int32
    word_t,  # [32] int64, ancestors of internal slots, twice
    word_l,  # [LEAVES] int64
    is_live,  # [32] int1
    is_live_l,  # [LEAVES] int1
    log_a,  # [16] float32
    log_a_l,  # [LEAVES] float32
    b,  # [32] float32, 0 of inert nodes, as is the next
    b_l,  # [LEAVES] float32
    height,
    SCALE: tl.constexpr,
    NORM_EPS: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    """Return what makes results of products with the state, and what a commit needs.

    ``X`` ``[16, 32]`` and ``[-G_l | P_l]`` ``[16, 2 LEAVES]``; what multiplies the products, ``[32]`` and ``[2 LEAVES]``, and
    leaves' own products, ``[LEAVES]``; path decays and scales of keys, ``[32]`` and ``[LEAVES]`` each.
    """
    i = tl.arange(0, 16)
    t = tl.arange(0, 32)
    A = is_above(word_t[None, :], node[:, None])
    A_l = is_above(word_l[None, :], node[:, None])
    x_scale = inverse_norm_of_halves(x0, x1, NORM_EPS)
    k_scale = first_half(x_scale)
    k_scale_l, q_scale_l = halves(inverse_norm_of_halves(y0, y1, NORM_EPS, 0))
    q_scale_l *= SCALE
    own = tl.where(is_live_l, own_products(y0, y1) * k_scale_l * q_scale_l, 0.0)
    # Chosen, not multiplied, here and below: an inert node may hold NaN.
    g = tl.sum(tl.where(A, log_a[:, None], 0.0), 0)
    g_l = tl.sum(tl.where(A_l, log_a[:, None], 0.0), 0) + tl.where(is_live_l, log_a_l, 0.0)
    of_raw = x_scale * tl.where(t < 16, -b, SCALE)
    D = tl.exp(tl.where(A, g[None, :] - first_half(g)[:, None], 0.0)) * k_scale[:, None]
    raw = exact_product(k, tl.trans(x), tl.zeros([16, 32], tl.float32), PRECISION)
    # No slot is t for queries: their own term stays.
    X = tl.where(A & (i[:, None] != t[None, :]), raw * D * of_raw[None, :], 0.0)
    D = tl.exp(tl.where(A_l, g_l[None, :] - first_half(g)[:, None], 0.0)) * k_scale[:, None]
    if y0.shape[1] >= 64:
        # As rows, of which there are enough for the wide matrix unit, then transposed.
        raw = tl.trans(columns(raw_product_of_halves(tl.trans(y0), tl.trans(y1), x0, x1, PRECISION), 0))
    else:
        raw = raw_product_of_halves(columns(k, 0), columns(k, 1), tl.trans(y0), tl.trans(y1), PRECISION)
    G_l = tl.where(A_l, columns(raw, 0) * D * (-b_l * k_scale_l)[None, :], 0.0)
    P_l = tl.where(A_l, columns(raw, 1) * D * q_scale_l[None, :], 0.0)
    of_x = tl.where(is_live, tl.exp(g) * of_raw, 0.0)
    of_k = tl.where(is_live_l, -tl.exp(g_l) * b_l * k_scale_l, 0.0)
    of_q = tl.where(is_live_l, tl.exp(g_l) * q_scale_l, 0.0)
    X = solve(X, height, SOLVE_PRECISION)
    return X, beside(G_l, P_l), of_x, beside(of_k, of_q), own, g, g_l, x_scale, k_scale_l
