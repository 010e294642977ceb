"""A trunk above a tree: accepted tokens whose state is not written yet, ``S = exp(G) S_0 + sum of exp(G - g_j) k_j u_j^T``.

``S`` is never formed. Products of rows x, raw keys and queries of nodes, with it are

    S^T x = exp(G) S_0^T x + sum over the trunk of exp(G - g_j) u_j (k_j . x)
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product
from treewy_inductor.lowerings.half_tile_kernel import raw_product_of_halves
from treewy_inductor.lowerings.row_products_kernel import products_of_rows
from treewy_inductor.lowerings.tree_block_kernel import columns


@triton.jit
def trunk_end(
    trunk_decay,  # [B, T, HV] float32
    length,
    ib,
    ih,
    T: tl.constexpr,
    HV: tl.constexpr,
):
    """Return ``G``, the trunk's last path decay, 0 of an empty one."""
    return tl.load(trunk_decay + (ib * T + tl.maximum(length - 1, 0)) * HV + ih, mask=length > 0, other=0.0)


@triton.jit
def load_trunk_weights(
    trunk_scale,  # [B, T, HK] float32, contiguous
    trunk_decay,  # [B, T, HV] float32, contiguous
    length,  # int32 scalar, slots in use
    start,
    ib,
    ih,
    T: tl.constexpr,
    HK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Return ``exp(G - g_j) / |k_j|`` of 16 slots, ``[16]``, 0 in free ones, and ``G``, 0 where all are free."""
    HV: tl.constexpr = HK * GROUPS
    j = start + tl.arange(0, 16)
    in_trunk = j < length
    slot = ib * T + j
    g_j = tl.load(trunk_decay + slot * HV + ih, mask=in_trunk, other=0.0)
    scale_j = tl.load(trunk_scale + slot * HK + ih // GROUPS, mask=in_trunk, other=0.0)
    end = trunk_end(trunk_decay, length, ib, ih, T, HV)
    return tl.where(in_trunk, tl.exp(tl.where(in_trunk, end - g_j, 0.0)) * scale_j, 0.0), end


@triton.jit
def load_trunk(
    trunk_keys,  # [B, T, HK, K] float, contiguous
    trunk_scale,  # [B, T, HK] float32
    trunk_values,  # [B, T, HV, V] float32
    trunk_decay,  # [B, T, HV] float32
    length,  # int32 scalar, slots in use
    start,
    ib,
    ih,
    c,  # [BLOCK_V] int32, value columns
    T: tl.constexpr,
    HK: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return 16 slots: raw keys ``[16, BLOCK_K]``, ``exp(G - g_j) / |k_j|`` ``[16]``, values ``[BLOCK_V, 16]``."""
    HV: tl.constexpr = HK * GROUPS
    ik = ih // GROUPS
    d = tl.arange(0, BLOCK_K)
    j = start + tl.arange(0, 16)
    in_trunk = j < length
    slot = ib * T + j
    k_j = tl.load(
        trunk_keys + ((slot * HK + ik) * K)[:, None] + d[None, :], mask=in_trunk[:, None] & (d < K)[None, :], other=0.0
    )
    u_j = tl.load(
        trunk_values + ((slot * HV + ih) * V)[None, :] + c[:, None], mask=(c < V)[:, None] & in_trunk[None, :], other=0.0
    )
    weight, _ = load_trunk_weights(trunk_scale, trunk_decay, length, start, ib, ih, T, HK, GROUPS)
    return k_j, weight, u_j


@triton.jit
def add_trunk_to_rows(
    products,  # [M, BLOCK_V] float32
    rows,  # [M] pointers to raw keys and queries
    trunk_keys,
    trunk_scale,
    trunk_values,
    trunk_decay,
    length,
    start,
    ib,
    ih,
    c,  # [BLOCK_V] int32, value columns
    key_end,
    T: tl.constexpr,
    HK: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STREAM: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    """Return ``products`` plus those of ``rows`` with 16 slots of the trunk; keys are read in steps, as the state is."""
    HV: tl.constexpr = HK * GROUPS
    j = start + tl.arange(0, 16)
    in_trunk = j < length
    # A slot in use stands in for those that are not: what it gives is multiplied with 0.
    slot = ib * T + tl.minimum(j, length - 1)
    kx = products_of_rows(rows, trunk_keys + (slot * HK + ih // GROUPS) * K, key_end, K, BLOCK_K, STREAM, PRECISION)
    g_j = tl.load(trunk_decay + slot * HV + ih)
    weight = tl.exp(trunk_end(trunk_decay, length, ib, ih, T, HV) - g_j) * tl.load(trunk_scale + slot * HK + ih // GROUPS)
    u_j = tl.load(trunk_values + ((slot * HV + ih) * V)[:, None] + c[None, :], mask=(c < V)[None, :], other=0.0)
    return exact_product(kx * tl.where(in_trunk, weight, 0.0)[None, :], u_j, products, SOLVE_PRECISION)


@triton.jit
def add_slots_to_tile(
    xS,  # [BLOCK_V, M] float32
    x0,  # [M, BLOCK_K / 2] float, first halves of raw keys and queries
    x1,  # second halves
    trunk_keys,
    trunk_scale,
    trunk_values,
    trunk_decay,
    length,
    start,
    ib,
    ih,
    c,  # [BLOCK_V] int32, value columns
    T: tl.constexpr,
    HK: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    """Return ``xS`` plus the products with 16 slots of the trunk."""
    k_j, weight, u_j = load_trunk(
        *(trunk_keys, trunk_scale, trunk_values, trunk_decay, length, start, ib, ih, c, T, HK, GROUPS, K, V, BLOCK_K)
    )
    kx = raw_product_of_halves(columns(k_j, 0), columns(k_j, 1), x0, x1, PRECISION) * weight[:, None]
    return exact_product(u_j, kx, xS, SOLVE_PRECISION)


@triton.jit
def add_trunk_to_tile(
    xS,  # [BLOCK_V, M] float32, products with S_0
    x0,  # [M, BLOCK_K / 2] float, first halves of raw keys and queries
    x1,  # second halves
    trunk_keys,
    trunk_scale,
    trunk_values,
    trunk_decay,
    trunk_length,
    ib,
    ih,
    c,  # [BLOCK_V] int32, value columns
    T: tl.constexpr,
    HK: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    """Return the products with ``S``, ``[BLOCK_V, M]`` float32."""
    length = tl.load(trunk_length + ib)
    xS *= tl.exp(trunk_end(trunk_decay, length, ib, ih, T, HK * GROUPS))
    if T <= 16:
        # No loop: of the loop over tiles around this the compiler fetches ahead only if there is none in it.
        xS = add_slots_to_tile(
            *(xS, x0, x1, trunk_keys, trunk_scale, trunk_values, trunk_decay, length, 0, ib, ih, c),
            *(T, HK, GROUPS, K, V, BLOCK_K, PRECISION, SOLVE_PRECISION),
        )
    else:
        for start in tl.range(0, length, 16, num_stages=1):
            xS = add_slots_to_tile(
                *(xS, x0, x1, trunk_keys, trunk_scale, trunk_values, trunk_decay, length, start, ib, ih, c),
                *(T, HK, GROUPS, K, V, BLOCK_K, PRECISION, SOLVE_PRECISION),
            )
    return xS
