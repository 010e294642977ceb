"""Matrix products of float32 accuracy on matrix units that multiply bfloat16.

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
def split(
    a,  # [M, K] float
    PRECISION: tl.constexpr,
):
    """Return ``hi`` and ``lo`` with ``a = hi + lo``, or ``a`` itself twice where bfloat16 is not used."""
    hi = a
    lo = a
    if PRECISION == "bf16x3":
        hi = a.to(tl.bfloat16)
        lo = (a - hi.to(tl.float32)).to(tl.bfloat16)
    return hi, lo


@triton.jit
def product_of_split(
    hi,  # [M, K] of split
    lo,  # [M, K] of split
    b,  # [K, N] float, bfloat16 if PRECISION is "bf16x3"
    IS_ONE_TERM: tl.constexpr,  # the number that was split is bfloat16
    PRECISION: tl.constexpr,
):
    """Return ``(hi + lo) @ b``, ``[M, N]`` float32: a matrix that meets many others is split once."""
    accumulator = tl.zeros([hi.shape[0], b.shape[1]], tl.float32)
    if PRECISION == "bf16x3":
        accumulator = tl.dot(hi, b, accumulator)
        if not IS_ONE_TERM:
            accumulator = tl.dot(lo, b, accumulator)
    else:
        accumulator = exact_product(hi, b, accumulator, PRECISION)
    return accumulator
