"""Verify the trees that :mod:`tree_gated_delta_kernel` leaves: more than 64 nodes, more than 16 internal ones, or other tiles.

A kernel of its own, so that neither way pays for the other's registers. Which rows of a batch hold such trees stands on the
device: few programs look it up, share the (row, value head, block of value columns) of those rows, and end at once where there
are none. One such unit is what verify_by_blocks_kernel.py describes.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.verify_by_blocks_kernel import verify_by_blocks


@triton.jit
def tree_gated_delta_by_blocks_kernel(
    query,  # [B, N, HK, K] float, stride 1 along K
    key,  # [B, N, HK, K] float, stride 1 along K
    value,  # [B, N, HV, V] float, stride 1 along V
    log_decay,  # [B, N, HV] float
    beta,  # [B, N, HV] float
    state,  # [B, HV, K, V] float, any strides
    ancestors,  # [B, N, W] int64, contiguous
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
    B,
    N,
    key_end,  # BLOCK_K, not known when this is compiled
    query_n: tl.constexpr,
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
    W: tl.constexpr,
    T: tl.constexpr,  # slots of the trunk between the state and the tree
    MOST_LEFT: tl.constexpr,  # rows with so few internal nodes are left alone; -1: none is
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K
    STREAM: tl.constexpr,  # of the key dimension in a step of streaming the state
    STAGES: tl.constexpr,  # steps of the state in flight
    PRECISION: tl.constexpr,  # of products with raw queries and keys
    SOLVE_PRECISION: tl.constexpr,  # of products of float32 with float32
):
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HV: tl.constexpr = HK * GROUPS
    for first in tl.range(0, B, 128, num_stages=1):
        row = first + tl.arange(0, 128)
        is_own = tl.load(internal + row, mask=row < B, other=-1) > MOST_LEFT
        place = tl.cumsum(is_own.to(tl.int32), 0)
        units = tl.sum(is_own.to(tl.int32), 0) * (HV * V_BLOCKS)
        for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), num_stages=1):
            iv = unit % V_BLOCKS
            ih = unit // V_BLOCKS % HV
            ik = ih // GROUPS
            # The first row at whose place more rows are own than the units of those before fill.
            ib = (first + tl.sum((place <= unit // (V_BLOCKS * HV)).to(tl.int32), 0)).to(tl.int64)
            verify_by_blocks(
                *(query + ib * query_b + ik * query_h, key + ib * key_b + ik * key_h, value + ib * value_b + ih * value_h),
                *(log_decay + ib * log_decay_b + ih * log_decay_h, beta + ib * beta_b + ih * beta_h),
                *(state + ib * state_b + ih * state_h, ancestors + ib * N * W, order + ib * N),
                *(tl.load(internal + ib), tl.load(height + ib)),
                *(trunk_keys, trunk_scale, trunk_values, trunk_decay, trunk_length),
                *(output + (ib * N * HV + ih) * V, pseudo_values + (ib * N * HV + ih) * V),
                *(path_decay + ib * N * HV + ih, key_scale + ib * N * HK + ik, N, ib, ih, iv, key_end),
                *(query_n, key_n, value_n, log_decay_n, beta_n, state_k, state_v),
                *(SCALE, NORM_EPS, HK, GROUPS, K, V, W, T),
                *(BLOCK_V, BLOCK_K, STREAM, STAGES, PRECISION, SOLVE_PRECISION),
            )
