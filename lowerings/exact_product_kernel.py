"""Matrix products of float32 accuracy on matrix units that multiply bfloat16.

A float32 number is the sum of a bfloat16 ``hi = bf16(x)`` and ``lo = bf16(x - hi)`` up to ``2^-17 x``. So

    a @ b = a_hi @ b_hi + a_hi @ b_lo + a_lo @ b_hi + O(2^-17)

three products at twice the rate of tf32 each, and two where one factor is bfloat16 already. ``hi`` is rounded with integers:
the chip converts single numbers at an eighth of that rate. Any other ``PRECISION`` is Triton's own for a float32 dot: "tf32x3"
on NVIDIA (for float16 and float32 inputs, whose bits do not fit bfloat16), "ieee" on AMD and in the interpreter, which
multiplies bfloat16 wrongly.
"""

import triton
import triton.language as tl


@triton.jit
def split(
    a,  # float32
):
    """Return bfloat16 ``hi`` and ``lo`` with ``a = hi + lo + O(2^-17 a)``."""
    bits = a.to(tl.int32, bitcast=True) + 0x8000
    hi = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    lo = (a - (bits & -65536).to(tl.float32, bitcast=True)).to(tl.bfloat16)
    return hi, lo


@triton.jit
def exact_product(
    a,  # [M, K] float, or some of these, [H, M, K], as are all
    b,  # [K, N] float
    accumulator,  # [M, N] float32
    PRECISION: tl.constexpr,  # "bf16x3", "tf32x3" or "ieee"
):
    """Return ``a @ b + accumulator``, ``[M, N]`` float32."""
    if PRECISION == "bf16x3":
        a_hi = a.to(tl.bfloat16)
        b_hi = b.to(tl.bfloat16)
        if a.dtype == tl.float32:
            a_hi, a_lo = split(a)
        if b.dtype == tl.float32:
            b_hi, b_lo = split(b)
        accumulator = tl.dot(a_hi, b_hi, accumulator)
        if a.dtype == tl.float32:
            accumulator = tl.dot(a_lo, b_hi, accumulator)
        if b.dtype == tl.float32:
            accumulator = tl.dot(a_hi, b_lo, accumulator)
    else:
        accumulator = tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision=PRECISION)
    return accumulator


@triton.jit
def terms_in_registers(
    a,  # [M, K] float
    PRECISION: tl.constexpr,
):
    """Return two bfloat16 terms of ``a``, the second 0 of a bfloat16 one, for :func:`product_of_terms`; else ``a`` twice.

    All pass through registers. Of a bfloat16 ``a`` loaded in a loop, Triton 3.6 lets the matrix unit read what a copy has just
    written to shared memory, without the fence that must stand between.
    """
    hi = a
    lo = a
    if PRECISION == "bf16x3":
        hi, lo = split(a.to(tl.float32))
    return hi, lo


@triton.jit
def product_of_terms(
    hi,  # [M, K], of terms_in_registers
    lo,  # [M, K]
    DTYPE: tl.constexpr,  # of what they are terms of
    b,  # [K, N] float
    accumulator,  # [M, N] float32
    PRECISION: tl.constexpr,
):
    """Return ``a @ b + accumulator`` as :func:`exact_product` does, of an ``a`` whose terms serve several products."""
    accumulator = exact_product(hi, b, accumulator, PRECISION)
    if PRECISION == "bf16x3" and hi.dtype != DTYPE:
        accumulator = exact_product(lo, b, accumulator, PRECISION)
    return accumulator


@triton.jit
def product_from_registers(
    a,  # [M, K] float
    b,  # [K, N] float
    accumulator,  # [M, N] float32
    PRECISION: tl.constexpr,
):
    """Return ``a @ b + accumulator`` as :func:`exact_product` does, ``a`` of any type read from registers."""
    hi, lo = terms_in_registers(a, PRECISION)
    return product_of_terms(hi, lo, a.dtype, b, accumulator, PRECISION)
