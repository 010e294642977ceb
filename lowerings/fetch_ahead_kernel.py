"""Ask for memory that is read later to be fetched into L2: the load of a tile without waiting for it, nor registers for it."""

import triton
import triton.language as tl


@triton.jit
def fetch_into_l2(
    memory,  # pointer, 16-byte aligned
    sink,  # any output: what looks like a store to it never happens
    ELEMENTS: tl.constexpr,  # contiguous from there on, a multiple of 16 bytes
):
    """Ask for ``ELEMENTS`` at ``memory`` by one instruction of one thread, without waiting for them; needs sm_90."""
    BYTES: tl.constexpr = ELEMENTS * memory.dtype.element_ty.primitive_bitwidth // 8
    # The result keeps the instruction alive; declared impure, torch could not tell which tensors the kernel writes.
    zero = tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [memory.to(tl.int64), BYTES],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    tl.store(sink, zero.to(sink.dtype.element_ty), mask=zero != 0)
