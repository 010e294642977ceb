"""Two products of the same rows with few columns each: ``left = x a`` and ``right = x b``, in parts of the summed dimension.

One program owns BLOCK_M rows and one of SPLITS parts of the K summed elements, and leaves float32 partial products that whoever
reads the results adds up. It reads 2 SHARE (BLOCK_M + 2 BLOCK_N) bytes of bfloat16 and multiplies a few MFLOP: a library's
kernel of 32 columns has too few programs to ask memory for much at once, and its start is most of its time.
"""

import triton
import triton.language as tl


@triton.jit
def narrow_products_kernel(
    x,  # [M, K] float
    left,  # [K, LEFT] like x
    right,  # [K, RIGHT] like x
    partial,  # [SPLITS, M, LEFT + RIGHT] float32, contiguous
    x_m,
    x_k,
    left_k,
    left_n,
    right_k,
    right_n,
    M,
    K: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,  # of K, multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # power of two >= LEFT and RIGHT
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    split = tl.program_id(0) % SPLITS
    m = tl.program_id(0) // SPLITS * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    rows = x + m.to(tl.int64)[:, None] * x_m
    first = split * SHARE
    total_left = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total_right = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(first, tl.minimum(first + SHARE, K), BLOCK_K, num_stages=STAGES):
        k = start + lane
        in_sum = (k < K)[None, :]
        a = tl.load(rows + k[None, :] * x_k, mask=(m < M)[:, None] & in_sum, other=0.0)
        b = tl.load(left + n[:, None] * left_n + k[None, :] * left_k, mask=(n < LEFT)[:, None] & in_sum, other=0.0)
        total_left = tl.dot(a, tl.trans(b), total_left, input_precision=PRECISION)
        b = tl.load(right + n[:, None] * right_n + k[None, :] * right_k, mask=(n < RIGHT)[:, None] & in_sum, other=0.0)
        total_right = tl.dot(a, tl.trans(b), total_right, input_precision=PRECISION)
    place = partial + ((split * M).to(tl.int64) + m)[:, None] * (LEFT + RIGHT)
    tl.store(place + n[None, :], total_left, mask=(m < M)[:, None] & (n < LEFT)[None, :])
    tl.store(place + LEFT + n[None, :], total_right, mask=(m < M)[:, None] & (n < RIGHT)[None, :])
