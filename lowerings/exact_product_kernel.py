"""Matrix products of float32 accuracy on matrix units that multiply bfloat16, and the ancestor mask both kernels read.

A float32 number is the sum of a bfloat16 ``hi = bf16(x)`` and ``lo = bf16(x - hi)`` up to ``2^-17 x``. So

    a @ b = a_hi @ b_hi + a_hi @ b_lo + a_lo @ b_hi + O(2^-17)

three products at twice the rate of tf32 each, and two where one factor is bfloat16 already. Any other ``PRECISION`` is
Triton's own for a float32 dot: "tf32x3" on NVIDIA (for float16 and float32 inputs, whose bits do not fit bfloat16), "ieee"
on AMD and in the interpreter, which multiplies bfloat16 wrongly.
"""

import triton
import triton.language as tl


@triton.jit
def exact_product(
    a,  # [M, K] float
    b,  # [K, N] float
    accumulator,  # [M, N] float32
    PRECISION: tl.constexpr,  # "bf16x3", "tf32x3" or "ieee"
):
    if PRECISION == "bf16x3":
        a_hi = a.to(tl.bfloat16)
        b_hi = b.to(tl.bfloat16)
        accumulator = tl.dot(a_hi, b_hi, accumulator)
        if a.dtype == tl.float32:
            a_lo = (a - a_hi.to(tl.float32)).to(tl.bfloat16)
            accumulator = tl.dot(a_lo, b_hi, accumulator)
        if b.dtype == tl.float32:
            b_lo = (b - b_hi.to(tl.float32)).to(tl.bfloat16)
            accumulator = tl.dot(a_hi, b_lo, accumulator)
    else:
        accumulator = tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision=PRECISION)
    return accumulator


@triton.jit
def is_ancestor(
    ancestors,  # [N, W] int64, bit i % 64 of word i // 64 of row t: node i is node t or above it
    node,  # [R] int32
    is_node,  # [R] int1, false on lanes that hold no node
    above,  # [C] int32
    is_above,  # [C] int1
    W: tl.constexpr,
):
    if W == 1:
        word = tl.load(ancestors + node, mask=is_node, other=0)[:, None]  # [R, 1]
        bit = (word >> above.to(tl.int64)[None, :]) & 1
    else:
        word = tl.load(ancestors + node[:, None] * W + above[None, :] // 64, mask=is_node[:, None] & is_above[None, :], other=0)
        bit = (word >> (above % 64).to(tl.int64)[None, :]) & 1
    return (bit != 0) & is_above[None, :]
