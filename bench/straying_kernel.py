"""A kernel that writes one element past its tensor: what bench.sanitize must find, or its tools watch nothing.

``python -m bench.straying_kernel`` launches it once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SIZE = 256


@triton.jit
def straying_kernel(
    out,  # [SIZE] float32 out
    SIZE: tl.constexpr,
):
    tl.store(out + 1 + tl.arange(0, SIZE), tl.zeros([SIZE], tl.float32))


def main() -> None:
    straying_kernel[(1,)](torch.zeros(SIZE, device="cuda"), SIZE)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
