"""Verify a draft tree against one state: ``(I + G) U = R``, ``o = exp(g) S^T q + P U``, U never leaving registers.

    R = beta (v - exp(g) S^T k)      with a trunk: S = exp(G) S_0 + sum of exp(G - g_j) k_j u_j^T, never formed
    16 nodes or fewer:           one block, solved before the state arrives: verify_one_block_kernel.py,
                                 of two value heads at once where programs abound: verify_two_heads_kernel.py
    16 internal nodes or fewer:  that block and leaves, which are nobody's ancestor: verify_with_leaves_kernel.py
    else                         left to a launch of its own: tree_gated_delta_by_blocks_kernel.py

One program owns one (batch row, value head) and PARTS tiles of BLOCK_V value columns of it, all transposed: value columns on
the 64-row side of the matrix unit, nodes on its narrow side. A tile has all its keys, so that it lies in memory as one piece:
what a program asks of memory is whole lines, few instructions, and one part ahead of what it works on. A float32 state enters
as two bfloat16 terms; bfloat16 queries and keys enter raw, hence exactly, and their norms multiply the products.

Bytes: 4 K V for the state, and 4 K N + 8 V N for the nodes. FLOPs: 8 K V N of state products, and 4 K 16 N of products of
keys. Up to 16 nodes memory is busy four fifths of the time; at 40 the work of one program bounds it, as registers leave too few
in flight.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.verify_one_block_kernel import verify_one_block
from treewy_inductor.lowerings.verify_two_heads_kernel import verify_two_heads
from treewy_inductor.lowerings.verify_with_leaves_kernel import verify_with_leaves


@triton.jit
def tree_gated_delta_kernel(
    query,  # [B, N, HK, K] float, stride 1 along K
    key,  # [B, N, HK, K] float, stride 1 along K
    value,  # [B, N, HV, V] float, stride 1 along V
    log_decay,  # [B, N, HV] float
    beta,  # [B, N, HV] float
    state,  # [B, HV, K, V] float, any strides
    ancestors,  # [B, N, 1] int64, contiguous: N <= 64
    order,  # [B, N] int32, contiguous
    internal,  # [B] int32
    height,  # [B] int32
    trunk_keys,  # [B, T, HK, K] float, contiguous, as are the next four; not read if T is 0
    trunk_scale,  # [B, T, HK] float32
    trunk_values,  # [B, T, HV, V] float32
    trunk_decay,  # [B, T, HV] float32
    trunk_length,  # [B] int32
    output,  # [B, N, HV, V] float out, contiguous
    pseudo_values,  # [B, N, HV, V] float32 out, contiguous
    path_decay,  # [B, N, HV] float32 out, contiguous
    key_scale,  # [B, N, HK] float32 out, contiguous
    query_b,
    query_h,
    key_b,
    key_h,
    value_b,
    value_h,
    log_decay_b,
    log_decay_h,
    beta_b,
    beta_h,
    state_b,
    state_h,
    N,
    query_n: tl.constexpr,  # as constants these make rows immediate offsets of one address
    key_n: tl.constexpr,
    value_n: tl.constexpr,
    log_decay_n: tl.constexpr,
    beta_n: tl.constexpr,
    state_k: tl.constexpr,
    state_v: tl.constexpr,
    SCALE: tl.constexpr,
    NORM_EPS: tl.constexpr,  # negative: query and key come normalised
    HK: tl.constexpr,
    GROUPS: tl.constexpr,  # value heads a key head
    K: tl.constexpr,
    V: tl.constexpr,
    T: tl.constexpr,  # slots of the trunk between the state and the tree
    SLOTS: tl.constexpr,  # 16, 32, 48 or 80, the first that N is not above
    HEADS: tl.constexpr,  # value heads a program, of one key head; 2 only with at most 16 nodes and no trunk
    PARTS: tl.constexpr,  # blocks of value columns a program, divides their number
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K
    STAGES: tl.constexpr,  # tiles of the state in flight
    IS_FETCHED: tl.constexpr,  # the program's part of the state, contiguous, is asked for at its start
    PRECISION: tl.constexpr,  # of products with raw queries and keys
    SOLVE_PRECISION: tl.constexpr,  # of products of float32 with float32
    VALUE_TERMS: tl.constexpr,  # bfloat16 ones that beta is the sum of, if values are bfloat16; else 0
    VALUE_PRECISION: tl.constexpr,  # else of products with values
):
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HV: tl.constexpr = HK * GROUPS
    PROGRAMS: tl.constexpr = V_BLOCKS // PARTS
    pid = tl.program_id(0)
    part_0 = pid % PROGRAMS * PARTS
    ih = pid // PROGRAMS % (HV // HEADS) * HEADS
    ib = (pid // (PROGRAMS * (HV // HEADS))).to(tl.int64)
    ik = ih // GROUPS
    state += ib * state_b + ih * state_h
    order += ib * N
    ancestors += ib * N
    query += ib * query_b + ik * query_h
    key += ib * key_b + ik * key_h
    value += ib * value_b + ih * value_h
    log_decay += ib * log_decay_b + ih * log_decay_h
    beta += ib * beta_b + ih * beta_h
    output += (ib * N * HV + ih) * V
    pseudo_values += (ib * N * HV + ih) * V
    path_decay += ib * N * HV + ih
    key_scale += ib * N * HK + ik
    height = tl.load(height + ib)
    if HEADS == 2:
        verify_two_heads(
            *(query, key, value, log_decay, beta, state, ancestors, height),
            *(output, pseudo_values, path_decay, key_scale, N, ih, part_0),
            *(value_h, log_decay_h, beta_h, state_h),
            *(query_n, key_n, value_n, log_decay_n, beta_n, state_k, state_v),
            *(SCALE, NORM_EPS, HK, GROUPS, K, V),
            *(PARTS, BLOCK_V, BLOCK_K, STAGES, IS_FETCHED, PRECISION, SOLVE_PRECISION, VALUE_TERMS, VALUE_PRECISION),
        )
    elif SLOTS == 16:
        verify_one_block(
            *(query, key, value, log_decay, beta, state, ancestors, height),
            *(trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length),
            *(output, pseudo_values, path_decay, key_scale, N, ib, ih, part_0),
            *(query_n, key_n, value_n, log_decay_n, beta_n, state_k, state_v),
            *(SCALE, NORM_EPS, HK, GROUPS, K, V, T),
            *(PARTS, BLOCK_V, BLOCK_K, STAGES, IS_FETCHED, PRECISION, SOLVE_PRECISION, VALUE_TERMS, VALUE_PRECISION),
        )
    elif tl.load(internal + ib) <= 16:
        verify_with_leaves(
            *(query, key, value, log_decay, beta, state, ancestors, order, height),
            *(trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length),
            *(output, pseudo_values, path_decay, key_scale, N, ib, ih, part_0),
            *(query_n, key_n, value_n, log_decay_n, beta_n, state_k, state_v),
            *(SCALE, NORM_EPS, HK, GROUPS, K, V, T, SLOTS - 16),
            *(PARTS, BLOCK_V, BLOCK_K, STAGES, IS_FETCHED, PRECISION, SOLVE_PRECISION, VALUE_TERMS, VALUE_PRECISION),
        )
