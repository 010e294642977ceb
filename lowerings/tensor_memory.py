"""Whether products of a loop fit the tensor memory of NVIDIA's chips since capability 10.0, by this Triton.

There a product's sum lies in tensor memory, 512 columns of 128 rows that the programs of a multiprocessor share. Outside of
loops products take turns in it. Triton 3.6 and 3.7 give each product of a loop columns of its own, make a trap of a kernel that
needs more than there are, and refuse to load it; 3.8 and 3.9 let products take turns in loops as well. Which of both a Triton
does is found by compiling, not read off its version.
"""

from __future__ import annotations

import functools

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from treewy_inductor.lowerings.products_in_a_loop_kernel import products_in_a_loop_kernel

COLUMNS = 512
# Of 128 columns each, so that all together do not fit, and two do.
PRODUCTS = 5


@functools.cache
def keeps_products_apart(capability: int) -> bool:
    """Whether each product of a loop has tensor memory of its own, so that many of them do not fit.

    Compiles a small kernel for a chip that need not be here: about a second, and nothing where Triton's cache has it.

    Args:
        capability: ten times major plus minor, 100 for a B200; without tensor memory, as on 90 and 120, nothing is kept apart.
    """
    source = ASTSource(
        fn=products_in_a_loop_kernel,
        signature={"weight": "*bf16", "out": "*bf16", "steps": "i32", "PRODUCTS": "constexpr"},
        constexprs={"PRODUCTS": PRODUCTS},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    return (getattr(compiled.metadata, "tmem_size", None) or 0) > COLUMNS


@functools.cache
def loops_lack_tensor_memory() -> bool:
    """Whether many products do not fit in a loop on the GPU that is here, by this Triton; False where there is none."""
    if torch.version.hip or not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    return major >= 10 and keeps_products_apart(10 * major + minor)
