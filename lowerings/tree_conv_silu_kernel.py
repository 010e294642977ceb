"""Causal convolution of a draft tree's nodes along their paths, its activation, and the nodes' inputs kept for the commit.

    y_t = silu(bias + sum over j of weight[K-1-j] x[j-th ancestor of t])        above the root: history[K + window]

One program owns one batch row, BLOCK_C channels and NODES nodes, BLOCK_N at a time. A node's ancestors are rows that the
program has mostly read itself, so that all but the first read of a row come from the multiprocessor's own cache. Only blocks
with a node whose path leaves the tree read the history. A program moves 6 NODES BLOCK_C bytes of bfloat16: bytes bound it.
"""

import triton
import triton.language as tl


@triton.jit
def tree_conv_silu_kernel(
    inputs,  # [B, C, N] float
    history,  # [B, C, K] like inputs
    weight,  # [C, K] float
    bias,  # [C] float, read if HAS_BIAS
    window,  # [B, N, K-1] int32
    output,  # [B, N, C] like inputs, contiguous
    kept,  # [B, N, C] like inputs, contiguous
    inputs_b,
    inputs_c,
    inputs_n,
    history_b,
    history_c,
    history_k,
    weight_c,
    weight_k,
    bias_c,
    window_b,
    window_n,
    window_j,
    C,
    N,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NODES: tl.constexpr,  # multiple of BLOCK_N
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    channel_blocks = tl.cdiv(C, BLOCK_C)
    parts = tl.cdiv(N, NODES)
    c = tl.program_id(0) % channel_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(0) // channel_blocks % parts * NODES
    ib = (tl.program_id(0) // channel_blocks // parts).to(tl.int64)
    is_channel = (c < C)[None, :]
    inputs += ib * inputs_b + c[None, :] * inputs_c
    history += ib * history_b + c[None, :] * history_c
    window += ib * window_b
    for start in range(first, tl.minimum(first + NODES, N), BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        is_row = t < N
        x = tl.load(inputs + t[:, None] * inputs_n, mask=is_row[:, None] & is_channel, other=0.0)  # [BLOCK_N, BLOCK_C]
        place = (ib * N + t)[:, None] * C + c[None, :]
        tl.store(kept + place, x, mask=is_row[:, None] & is_channel)
        own = tl.load(weight + c * weight_c + (K - 1) * weight_k, mask=c < C, other=0.0)
        total = own.to(tl.float32)[None, :] * x.to(tl.float32)
        for j in tl.static_range(1, K):
            node = tl.load(window + t * window_n + (j - 1) * window_j, mask=is_row, other=-K - 1)  # [BLOCK_N]
            seen = tl.load(inputs + node[:, None] * inputs_n, mask=(node >= 0)[:, None] & is_channel, other=0.0)
            is_past = (node < 0) & (node >= -K)
            if tl.max(is_past.to(tl.int32), 0) > 0:
                column = tl.maximum(node, -K) + K
                past = tl.load(history + column[:, None] * history_k, mask=is_past[:, None] & is_channel, other=0.0)
                seen = tl.where(is_past[:, None], past, seen)
            factor = tl.load(weight + c * weight_c + (K - 1 - j) * weight_k, mask=c < C, other=0.0)
            total += factor.to(tl.float32)[None, :] * seen.to(tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + c * bias_c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        # An inert node's window points nowhere, and what it holds may be NaN.
        is_node = tl.load(window + t * window_n, mask=is_row, other=-K - 1) >= -K
        total = tl.where(is_node[:, None], total, 0.0)
        y = total / (1.0 + tl.exp(-total))
        tl.store(output + place, y.to(output.dtype.element_ty), mask=is_row[:, None] & is_channel)
