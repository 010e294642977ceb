"""Verify a draft tree against one state: ``(I + G) U = R``, ``o = exp(g) S^T q + P U``, U never leaving registers.

    R = beta (v - exp(g) S^T k)
    for each block J of 16 internal nodes:  O += readout_J R_J,  R += correction_J R_J       (tree_operators_kernel.py)
    U = R,  O += (q . k) U at nodes that no block covers

One program owns one (batch row, value head) and BLOCK_V value columns, all transposed: value columns on the 64-row side
of the matrix unit, nodes on its narrow side. The state is read once, in chunks of BLOCK_K along the key dimension by a
pipelined loop; stored with keys innermost, as a TreeCache keeps it, its rows load whole. A float32 state enters as two
bfloat16 terms; bfloat16 queries and keys enter raw, hence exactly, and their norms multiply the products.

Bytes: 4 K V a head for the state, and 2 K (N/groups) + 8 V N for the nodes. FLOPs: 8 K V N of state products and 12 V N
a internal node: memory bounds it up to about 40 nodes.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product


@triton.jit
def tree_gated_delta_kernel(
    query,  # [B, N, HK, K] float, stride 1 along K
    key,  # [B, N, HK, K] float, stride 1 along K
    value,  # [B, N, HV, V] float, stride 1 along V
    state,  # [B, HV, K, V] float, any strides
    order,  # [B, N] int32, contiguous
    internal,  # [B] int32
    operators,  # [B, HV, BLOCK_N/16, 2, 16, BLOCK_N] float32
    factors,  # [B, HV, 4, BLOCK_N] float32
    output,  # [B, N, HV, V] float out, contiguous
    pseudo_values,  # [B, N, HV, V] float32 out, contiguous
    query_b,
    query_n,
    query_h,
    key_b,
    key_n,
    key_h,
    value_b,
    value_n,
    value_h,
    state_b,
    state_h,
    state_k,
    state_v,
    N,
    HK: tl.constexpr,
    GROUPS: tl.constexpr,  # value heads a key head
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,  # power of two >= max(N, 16)
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,  # chunks of the state in flight
    PRECISION: tl.constexpr,  # of products with raw queries and keys
    SOLVE_PRECISION: tl.constexpr,  # of products of float32 with float32
):
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HV: tl.constexpr = HK * GROUPS
    iv = tl.program_id(0) % V_BLOCKS
    ih = tl.program_id(0) // V_BLOCKS % HV
    ib = (tl.program_id(0) // (V_BLOCKS * HV)).to(tl.int64)

    slot = tl.arange(0, BLOCK_N)
    in_row = slot < N
    node = tl.load(order + ib * N + slot, mask=in_row, other=0)
    c = iv * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_K)
    in_v = c < V
    query += ib * query_b + ih // GROUPS * query_h
    key += ib * key_b + ih // GROUPS * key_h
    state += ib * state_b + ih * state_h
    tile = in_v[:, None] & in_row[None, :]
    v = tl.load(value + ib * value_b + ih * value_h + node[None, :] * value_n + c[:, None], mask=tile, other=0.0)

    kS = tl.zeros([BLOCK_V, BLOCK_N], tl.float32)
    qS = tl.zeros([BLOCK_V, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0 and V % BLOCK_V == 0:
            S = tl.load(state + c[:, None] * state_v + (start + d)[None, :] * state_k)
        else:
            in_state = in_v[:, None] & (start + d < K)[None, :]
            S = tl.load(state + c[:, None] * state_v + (start + d)[None, :] * state_k, mask=in_state, other=0.0)
        in_k = in_row[:, None] & (start + d < K)[None, :]
        k = tl.load(key + node[:, None] * key_n + (start + d)[None, :], mask=in_k, other=0.0)
        q = tl.load(query + node[:, None] * query_n + (start + d)[None, :], mask=in_k, other=0.0)
        kS = exact_product(S, tl.trans(k), kS, PRECISION)
        qS = exact_product(S, tl.trans(q), qS, PRECISION)

    factors += (ib * HV + ih) * 4 * BLOCK_N + slot
    of_kS = tl.load(factors)
    of_qS = tl.load(factors + BLOCK_N)
    own = tl.load(factors + 2 * BLOCK_N)
    beta = tl.load(factors + 3 * BLOCK_N)
    # Chosen, not multiplied: an inert node may hold NaN.
    R = tl.where((beta != 0.0)[None, :], beta[None, :] * v.to(tl.float32) - of_kS[None, :] * kS, 0.0)
    o = tl.where((of_qS != 0.0)[None, :], of_qS[None, :] * qS, 0.0)

    BLOCKS: tl.constexpr = BLOCK_N // 16
    i = tl.arange(0, 16)
    operators += (ib * HV + ih) * BLOCKS * 32 * BLOCK_N
    cell = i[:, None] * BLOCK_N + slot[None, :]
    for block in tl.range(0, tl.cdiv(tl.load(internal + ib), 16), num_stages=1):
        if BLOCKS == 1:
            R_J = R
        else:
            is_block = (tl.arange(0, BLOCKS) == block)[None, :, None]
            R_J = tl.sum(tl.where(is_block, tl.reshape(R, [BLOCK_V, BLOCKS, 16]), 0.0), 1)
        correction = tl.load(operators + block * 32 * BLOCK_N + cell)
        readout = tl.load(operators + (block * 32 + 16) * BLOCK_N + cell)
        o = exact_product(R_J, readout, o, SOLVE_PRECISION)
        R = exact_product(R_J, correction, R, SOLVE_PRECISION)
    o += own[None, :] * R

    cells = ((ib * N + node[None, :]) * HV + ih) * V + c[:, None]
    tl.store(output + cells, o.to(output.dtype.element_ty), mask=tile)
    tl.store(pseudo_values + cells, R, mask=tile)
