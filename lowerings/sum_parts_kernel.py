"""Sum the parts of a split softmax: ``o = sum over s of 2^(top_s - top) acc_s / sum over s of 2^(top_s - top) total_s``.

One program owns one (batch row, node, head) and reads what the parts that its row's length fills have left of it, all at
once: E floats a part. Its launch bounds it.
"""

import triton
import triton.language as tl


@triton.jit
def sum_parts_kernel(
    partial,  # [SPLITS, B, N, H, E] float32, contiguous
    tops,  # [SPLITS, B, N, H] float32, contiguous
    totals,  # [SPLITS, B, N, H] float32, contiguous
    ancestors,  # [B, N, W] int64
    lengths,  # [B] int64
    output,  # [B, N, H, E] float, contiguous
    ancestors_b,
    ancestors_n,
    ancestors_w,
    lengths_b,
    B,
    L,
    N: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_L: tl.constexpr,  # positions a block of the kernel that made the parts
    BLOCK_S: tl.constexpr,  # power of two >= SPLITS
    BLOCK_E: tl.constexpr,  # power of two >= E
):
    place = tl.program_id(0).to(tl.int64)
    t = tl.program_id(0) // H % N
    ib = place // (N * H)
    end = tl.minimum(tl.load(lengths + ib * lengths_b) + N, L)
    blocks = (end + BLOCK_L - 1) // BLOCK_L
    share = (blocks + SPLITS - 1) // SPLITS
    own = tl.load(ancestors + ib * ancestors_b + t * ancestors_n + t // 64 * ancestors_w)
    is_node = ((own >> (t % 64)) & 1) != 0

    s = tl.arange(0, BLOCK_S)
    e = tl.arange(0, BLOCK_E)
    part = place + s.to(tl.int64) * B * N * H  # [BLOCK_S]
    is_filled = (s < SPLITS) & (s * share < tl.where(is_node, blocks, 0))
    top = tl.load(tops + part, mask=is_filled, other=float("-inf"))
    total = tl.load(totals + part, mask=is_filled, other=0.0)
    acc = tl.load(partial + part[:, None] * E + e[None, :], mask=is_filled[:, None] & (e < E)[None, :], other=0.0)
    weight = tl.where(is_filled, tl.exp2(top - tl.max(top, 0)), 0.0)
    o = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)  # [BLOCK_E]
    tl.store(output + place * E + e, tl.where(is_node, o, 0.0).to(output.dtype.element_ty), mask=e < E)
