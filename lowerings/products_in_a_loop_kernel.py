"""Products in a loop, each of what the last one gave: ``X <- X W``, PRODUCTS times a step, ``X`` and ``W`` 128 x 128.

Nobody runs it: compiled, it tells whether products of a loop take turns in the tensor memory of NVIDIA's chips since capability
10.0, see tensor_memory.py. One program; a step writes 32 KiB and does PRODUCTS 2^22 FLOPs.
"""

import triton
import triton.language as tl


@triton.jit
def products_in_a_loop_kernel(
    weight,  # [128, 128] bfloat16, contiguous
    out,  # [steps, 128, 128] bfloat16 out, contiguous
    steps,
    PRODUCTS: tl.constexpr,
):
    place = tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
    w = tl.load(weight + place)
    for step in tl.range(0, steps, num_stages=1):
        x = w
        for _ in tl.static_range(PRODUCTS):
            x = tl.dot(x, w).to(tl.bfloat16)
        tl.store(out + step * 16384 + place, x)
