"""Causal convolution of a draft tree's nodes along their paths, its activation, and the nodes' inputs kept for the commit.

    y_t = silu(bias + sum over j of weight[K-1-j] x[j-th ancestor of t])        above the root: history[K + window]

One program owns one batch row, BLOCK_C channels and NODES nodes, BLOCK_N at a time. Weights and history have their columns
innermost, so a channel's are read once, as one vector, and split: a column by itself would be two bytes of every eight. A
node's ancestors are rows that the program has mostly read itself, so that all but the first read of a row come from the
multiprocessor's own cache. A program moves 6 NODES BLOCK_C bytes of bfloat16: bytes bound it.
"""

import triton
import triton.language as tl


@triton.jit
def _columns(
    rows,  # [BLOCK_C] pointers to the first column of a channel
    stride: tl.constexpr,
    is_channel,  # [BLOCK_C] bool
    K: tl.constexpr,  # at most 4
    BLOCK_C: tl.constexpr,
):
    """Return four columns ``[BLOCK_C]``, the last ones zero if there are fewer."""
    k = tl.arange(0, 4)
    tile = tl.load(rows[:, None] + k[None, :] * stride, mask=is_channel[:, None] & (k < K)[None, :], other=0.0)
    even, odd = tl.split(tl.reshape(tile, [BLOCK_C, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _column(
    columns,  # four of [BLOCK_C]
    J: tl.constexpr,
):
    return columns[0] if J == 0 else (columns[1] if J == 1 else (columns[2] if J == 2 else columns[3]))


@triton.jit
def tree_conv_silu_kernel(
    inputs,  # [B, C, N] float
    history,  # [B, C, K] like inputs
    weight,  # [C, K] float
    bias,  # [C] float, read if HAS_BIAS
    window,  # [B, N, K-1] int32
    output,  # [B, N, C] like inputs, contiguous
    kept,  # [B, N, C] like inputs, contiguous
    part,  # [B, N, WIDTH] like inputs, contiguous; written if WIDTH is not 0
    inputs_b,
    inputs_c,
    inputs_n,
    history_b,
    bias_c,
    window_b,
    window_n,
    window_j,
    C,
    N,
    # Known when compiled, so that the columns of a channel are read as one vector.
    history_c: tl.constexpr,
    history_k: tl.constexpr,
    weight_c: tl.constexpr,
    weight_k: tl.constexpr,
    K: tl.constexpr,  # 2 to 4
    HAS_BIAS: tl.constexpr,
    FIRST: tl.constexpr,  # channel of the outputs that part holds once more
    WIDTH: tl.constexpr,
    NODES: tl.constexpr,  # multiple of BLOCK_N
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    channel_blocks = tl.cdiv(C, BLOCK_C)
    parts = tl.cdiv(N, NODES)
    c = tl.program_id(0) % channel_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(0) // channel_blocks % parts * NODES
    ib = (tl.program_id(0) // channel_blocks // parts).to(tl.int64)
    is_channel = c < C
    is_part = (c >= FIRST) & (c < FIRST + WIDTH)
    factors = _columns(weight + c * weight_c, weight_k, is_channel, K, BLOCK_C)
    past = _columns(history + ib * history_b + c * history_c, history_k, is_channel, K, BLOCK_C)
    inputs += ib * inputs_b + c[None, :] * inputs_c
    window += ib * window_b
    for start in range(first, tl.minimum(first + NODES, N), BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        is_row = t < N
        x = tl.load(inputs + t[:, None] * inputs_n, mask=is_row[:, None] & is_channel[None, :], other=0.0)
        total = _column(factors, K - 1).to(tl.float32)[None, :] * x.to(tl.float32)  # [BLOCK_N, BLOCK_C]
        for j in tl.static_range(1, K):
            node = tl.load(window + t * window_n + (j - 1) * window_j, mask=is_row, other=-K - 1)  # [BLOCK_N]
            seen = tl.load(inputs + node[:, None] * inputs_n, mask=(node >= 0)[:, None] & is_channel[None, :], other=0.0)
            if tl.max(((node < 0) & (node >= -K)).to(tl.int32), 0) > 0:
                # Column i of the history stands -K + i tokens before the root.
                for i in tl.static_range(0, K):
                    seen = tl.where((node == i - K)[:, None], _column(past, i)[None, :], seen)
            total += _column(factors, K - 1 - j).to(tl.float32)[None, :] * seen.to(tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + c * bias_c, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        # An inert node's window points nowhere, and what it holds may be NaN.
        is_node = tl.load(window + t * window_n, mask=is_row, other=-K - 1) >= -K
        total = tl.where(is_node[:, None], total, 0.0)
        y = total / (1.0 + tl.exp(-total))
        place = (ib * N + t)[:, None] * C + c[None, :]
        tl.store(kept + place, x, mask=is_row[:, None] & is_channel[None, :])
        tl.store(output + place, y.to(output.dtype.element_ty), mask=is_row[:, None] & is_channel[None, :])
        if WIDTH > 0:
            here = part + (ib * N + t)[:, None] * WIDTH + (c - FIRST)[None, :]
            tl.store(here, y.to(output.dtype.element_ty), mask=is_row[:, None] & is_part[None, :])
