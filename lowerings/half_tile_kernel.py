"""Tiles of the state with all their keys, and the rows of keys and queries that meet them, in two halves of the key dimension.

In halves, since what a program splits in bfloat16 terms at once must fit its registers; values of nodes come in by a product.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product, split
from treewy_inductor.lowerings.row_products_kernel import step_of_rows
from treewy_inductor.lowerings.tree_block_kernel import raw_product, state_step


@triton.jit
def load_half_rows(
    rows,  # [M] pointers to rows of K elements, stride 1
    half: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the first or second half of the rows, ``[M, BLOCK_K / 2]``, 0 past ``K``."""
    return step_of_rows(rows, half * (BLOCK_K // 2), K, BLOCK_K, BLOCK_K // 2)


@triton.jit
def inverse_norm_of_halves(
    x0,  # [M, BLOCK_K / 2] float, or [BLOCK_K / 2, M]
    x1,  # like it
    NORM_EPS: tl.constexpr,  # negative: rows come normalised
    AXIS: tl.constexpr = 1,  # along which a row's elements lie
):
    """Return ``1 / |x|`` of each row, ``[M]`` float32."""
    scale = tl.full([x0.shape[1 - AXIS]], 1.0, tl.float32)
    if NORM_EPS >= 0:
        x0 = x0.to(tl.float32)
        x1 = x1.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x0 * x0 + x1 * x1, AXIS) + NORM_EPS)
    return scale


@triton.jit
def raw_product_of_halves(
    x0,  # [M, BLOCK_K / 2] float
    x1,
    y0,  # [C, BLOCK_K / 2] float
    y1,
    PRECISION: tl.constexpr,
):
    """Return ``x_t . y_i``, ``[M, C]`` float32."""
    return exact_product(x1, tl.trans(y1), raw_product(x0, y0, PRECISION), PRECISION)


@triton.jit
def half_tile(
    state,  # [K, V] at strides state_k, state_v, of this head
    c,  # [BLOCK_V] int32, value columns
    half: tl.constexpr,
    state_k: tl.constexpr,
    state_v: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the first or second half of the keys of these columns, transposed: ``[BLOCK_V, BLOCK_K / 2]``."""
    return state_step(state, c, half * (BLOCK_K // 2), state_k, state_v, K, V, BLOCK_V, BLOCK_K, BLOCK_K // 2)


@triton.jit
def load_values(
    rows,  # [M] pointers to rows of V elements, stride 1
    c,  # [BLOCK_V] int32, value columns
    is_live,  # [M] int1
    V: tl.constexpr,
):
    """Return those columns of the rows, ``[M, BLOCK_V]``, 0 in rows that are not ``is_live``."""
    return tl.load(rows[:, None] + c[None, :], mask=is_live[:, None] & (c < V)[None, :], other=0.0)


@triton.jit
def add_scaled_values(
    R,  # [BLOCK_V, C] float32
    v,  # [M, BLOCK_V] float
    b,  # [C] float32, 0 from M on
    TERMS: tl.constexpr,  # bfloat16 ones that hold all bits of b, 1 or 3; 0 if v is no bfloat16
    PRECISION: tl.constexpr,  # else
):
    """Return ``R + b_t v_t`` in columns t: a product with a diagonal, so that values come in the layout of ``R`` for free."""
    i = tl.arange(0, v.shape[0])
    t = tl.arange(0, b.shape[0])
    B = tl.where(i[:, None] == t[None, :], b[None, :], 0.0)
    if TERMS == 0:
        R = exact_product(tl.trans(v.to(tl.float32)), B, R, PRECISION)
    elif TERMS == 1:
        R = tl.dot(tl.trans(v), B.to(tl.bfloat16), R)
    else:
        hi, _ = split(B)
        mid, lo = split(B - hi.to(tl.float32))
        R = tl.dot(tl.trans(v), hi, R)
        R = tl.dot(tl.trans(v), mid, R)
        R = tl.dot(tl.trans(v), lo, R)
    return R
