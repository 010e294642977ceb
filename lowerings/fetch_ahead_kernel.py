"""Ask for memory that a later program will read: the load of a tile without waiting for it, nor registers for it."""

import triton
import triton.language as tl


@triton.jit
def fetch_into_l2(
    address,  # [LINES] pointers, 128 bytes apart
    sink,  # any output: what looks like a store to it never happens
    LINES: tl.constexpr,
):
    """Ask for the lines at ``address`` without waiting for them."""
    # The result keeps the instruction alive; declared impure, torch could not tell which tensors the kernel writes.
    zero = tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(sink + tl.arange(0, LINES), zero.to(sink.dtype.element_ty), mask=zero != 0)
