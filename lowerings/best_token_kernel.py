"""The most likely token of each row of logits, the first of equals and NaN above all, as ``argmax`` has it, in two kernels.

One program of the first owns one of SPLITS parts of a row and keeps, for each of BLOCK lanes, the largest logit so far and the
step that held it: two operations an element beside its load, so that bytes bound it. The second looks through the parts.
"""

import triton
import triton.language as tl


@triton.jit
def _best(
    value,  # [BLOCK] float32
    index,  # [BLOCK] int32
    SIZE: tl.constexpr,  # above any index
):
    is_nan = value != value
    some_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    top = tl.max(tl.where(is_nan, float("-inf"), value), 0)
    found = tl.min(tl.where(tl.where(some_nan, is_nan, value == top), index, SIZE), 0)
    return tl.where(some_nan, float("nan"), top), found


@triton.jit
def best_of_part_kernel(
    logits,  # [R, V] float, last dim contiguous
    tops,  # [R, SPLITS] float32, contiguous
    places,  # [R, SPLITS] int32, contiguous
    logits_r,
    V: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,  # of a row, multiple of BLOCK
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    split = tl.program_id(0) % SPLITS
    row = (tl.program_id(0) // SPLITS).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    logits += row * logits_r
    first = split * SHARE
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32) + first
    for start in tl.range(first, tl.minimum(first + SHARE, V), BLOCK, num_stages=STAGES):
        value = tl.load(logits + start + lane, mask=start + lane < V, other=float("-inf")).to(tl.float32)
        # Not "not greater": once NaN, a lane stays with the first.
        is_better = (value > best) | ((value != value) & (best == best))
        best = tl.where(is_better, value, best)
        at = tl.where(is_better, start, at)
    top, found = _best(best, at + lane, V + SHARE)
    tl.store(tops + row * SPLITS + split, top)
    tl.store(places + row * SPLITS + split, found)


@triton.jit
def best_of_parts_kernel(
    tops,  # [R, SPLITS] float32, contiguous
    places,  # [R, SPLITS] int32, contiguous
    tokens,  # [R] int64, contiguous
    V: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,  # power of two >= SPLITS
):
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    value = tl.load(tops + row * SPLITS + s, mask=s < SPLITS, other=float("-inf"))
    place = tl.load(places + row * SPLITS + s, mask=s < SPLITS, other=V)
    _, found = _best(value, place, V)
    tl.store(tokens + row, found.to(tl.int64))
