"""What at most 16 nodes of one value head do to products with its state, and what they store of it.

    X = (I - L)^-1 [L | P],  L = -G           so that [U | O] = [R | exp(g) S^T q] + R X
    R = beta v - exp(g) beta S^T k

Slots are nodes. Rows of products with the state are keys of 16 slots, then their queries, and so are columns of X: all is
made transposed, ancestor i along the first axis and node t along the second, as the products read it.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product
from treewy_inductor.lowerings.half_tile_kernel import add_scaled_values, raw_product_of_halves
from treewy_inductor.lowerings.tree_block_kernel import columns, first_half


@triton.jit
def operators_of_block(
    k0,  # [16, BLOCK_K / 2] float, first halves of raw keys
    k1,  # second halves
    x0,  # [32, BLOCK_K / 2] float, first halves of raw keys, then queries
    x1,  # second halves
    x_scale,  # [32] float32, 1 / |x|
    A,  # [16, 32] int1, i is t or above it; none of an inert node
    is_live,  # [32] int1
    log_a,  # [16] float32
    b,  # [32] float32, 0 of queries
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return ``[L | P]``, what multiplies raw keys and queries, beta of live nodes, and path decays."""
    i = tl.arange(0, 16)
    t = tl.arange(0, 32)
    # Chosen, not multiplied, here and below: an inert node may hold NaN.
    g = tl.sum(tl.where(A, log_a[:, None], 0.0), 0)
    b = tl.where(is_live, b, 0.0)
    of_raw = x_scale * tl.where(t < 16, -b, SCALE)
    D = tl.exp(tl.where(A, g[None, :] - first_half(g)[:, None], 0.0)) * first_half(x_scale)[:, None]
    # No slot is t for queries: their own term stays.
    X = tl.where(A & (i[:, None] != t[None, :]), raw_product_of_halves(k0, k1, x0, x1, PRECISION) * D * of_raw[None, :], 0.0)
    return X, of_raw, b, g


@triton.jit
def store_results(
    xS,  # [BLOCK_V, 32] float32, products of raw keys and queries with the state
    of_xS,  # [32] float32, what multiplies them, 0 of inert nodes
    v,  # [16, BLOCK_V] float
    b,  # [32] float32
    X,  # [16, 32] float32, (I - L)^-1 [L | P]
    pseudo_values,  # [N, HV, V] from this head on, as is the next
    output,
    node,  # [16] int32
    c,  # [BLOCK_V] int32, value columns
    N,
    HV: tl.constexpr,
    V: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
    VALUE_TERMS: tl.constexpr,
    VALUE_PRECISION: tl.constexpr,
):
    """Store ``[U | O]`` of these columns."""
    R = tl.where((of_xS != 0.0)[None, :], of_xS[None, :] * xS, 0.0)
    R = add_scaled_values(R, v, b, VALUE_TERMS, VALUE_PRECISION)
    R = exact_product(columns(R, 0), X, R, SOLVE_PRECISION)
    out = node[None, :] * (HV * V) + c[:, None]
    tile = (c < V)[:, None] & (tl.arange(0, 16) < N)[None, :]
    tl.store(pseudo_values + out, columns(R, 0), mask=tile)
    tl.store(output + out, columns(R, 1).to(output.dtype.element_ty), mask=tile)
