"""A trunk above a tree: accepted tokens whose state is not written yet, ``S = exp(G) S_0 + sum of exp(G - g_j) k_j u_j^T``.

``S`` is never formed. Products of rows x, raw keys and queries of nodes, with it start from what the trunk gives them,

    S^T x = sum over the trunk of exp(G - g_j) u_j (k_j . x) + (exp(G) S_0)^T x

which needs no state and so is made before it arrives; ``S_0`` is scaled as it streams. Meanwhile a trunk costs no register.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product
from treewy_inductor.lowerings.half_tile_kernel import raw_product_of_halves
from treewy_inductor.lowerings.tree_block_kernel import columns, products_with_step, raw_product, state_step


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
    """Return 16 slots and ``G``: raw keys ``[16, BLOCK_K]``, ``exp(G - g_j) / |k_j|`` ``[16]``, values ``[BLOCK_V, 16]``."""
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
    g_j = tl.load(trunk_decay + slot * HV + ih, mask=in_trunk, other=0.0)
    scale_j = tl.load(trunk_scale + slot * HK + ik, mask=in_trunk, other=0.0)
    end = trunk_end(trunk_decay, length, ib, ih, T, HV)
    weight = tl.where(in_trunk, tl.exp(tl.where(in_trunk, end - g_j, 0.0)) * scale_j, 0.0)
    return k_j, weight, u_j, end


@triton.jit
def add_trunk(
    products,  # [BLOCK_V, M] float32
    rows,  # [M] pointers to raw keys and queries
    k_j,  # of load_trunk, as are the next two
    weight,
    u_j,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    """Return ``products`` plus those of 16 slots of the trunk with ``rows``."""
    d = tl.arange(0, BLOCK_K)
    x = tl.load(rows[:, None] + d[None, :], mask=(d < K)[None, :], other=0.0)
    return exact_product(u_j, raw_product(k_j, x, PRECISION) * weight[:, None], products, SOLVE_PRECISION)


@triton.jit
def state_products_below_trunk(
    state,  # [K, V] at strides state_k, state_v, of this head
    rows,  # [2 M] pointers to raw keys of M slots, then to their raw queries
    c,  # [BLOCK_V] int32, value columns
    k_j,  # first slots of the trunk, of load_trunk, as are the next three
    weight,
    u_j,
    end,
    trunk_keys,
    trunk_scale,
    trunk_values,
    trunk_decay,
    length,
    ib,
    ih,
    state_k: tl.constexpr,
    state_v: tl.constexpr,
    T: tl.constexpr,
    HK: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STREAM: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    """Return ``S^T k`` and ``S^T q`` of all slots, ``[BLOCK_V, M]`` float32 each, ``S_0`` read once."""
    M: tl.constexpr = rows.shape[0] // 2
    products = tl.zeros([BLOCK_V, 2 * M], tl.float32)
    if length > 0:
        products = add_trunk(products, rows, k_j, weight, u_j, K, BLOCK_K, PRECISION, SOLVE_PRECISION)
    if T > 16:
        for start in tl.range(16, length, 16, num_stages=1):
            k_j, weight, u_j, _ = load_trunk(
                *(trunk_keys, trunk_scale, trunk_values, trunk_decay, length, start, ib, ih, c),
                *(T, HK, GROUPS, K, V, BLOCK_K),
            )
            products = add_trunk(products, rows, k_j, weight, u_j, K, BLOCK_K, PRECISION, SOLVE_PRECISION)
    decay = tl.exp(end)
    for start in tl.range(0, BLOCK_K, STREAM, num_stages=STAGES):
        S = state_step(state, c, start, state_k, state_v, K, V, BLOCK_V, BLOCK_K, STREAM).to(tl.float32) * decay
        products = products_with_step(S, rows, start, products, K, BLOCK_K, STREAM, PRECISION)
    return columns(products, 0), columns(products, 1)


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
    k_j, weight, u_j, _ = load_trunk(
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
