"""Move the convolution histories of all layers along the accepted path, in place.

The new history is the last K columns of the old one followed by the path's inputs: column j is old column j + count where
that exists, else the input of path step j + count - K. One program owns one (layer, batch row) and BLOCK_C channels and
moves 2 K BLOCK_C elements: bytes bound it, and at verify sizes its launch.
"""

import triton
import triton.language as tl


@triton.jit
def commit_conv_kernel(
    history,  # [L, B, C, K] float, any strides, overwritten
    inputs,  # [L, B, C, N] float, any strides
    path,  # [B, P] int32, contiguous, -1 after the accepted node
    history_l,
    history_b,
    history_c,
    history_k,
    inputs_l,
    inputs_b,
    inputs_c,
    inputs_n,
    B,
    C,
    P,
    K: tl.constexpr,
    BLOCK_P: tl.constexpr,  # power of two >= P
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K
):
    c_blocks = tl.cdiv(C, BLOCK_C)
    ic = tl.program_id(0) % c_blocks
    ib = (tl.program_id(0) // c_blocks % B).to(tl.int64)
    il = (tl.program_id(0) // c_blocks // B).to(tl.int64)

    p = tl.arange(0, BLOCK_P)
    count = tl.sum((tl.load(path + ib * P + p, mask=p < P, other=-1) >= 0).to(tl.int32), 0)
    if count == 0:
        return
    c = ic * BLOCK_C + tl.arange(0, BLOCK_C)
    j = tl.arange(0, BLOCK_K)
    tile = (c < C)[:, None] & (j < K)[None, :]
    column = j + count
    is_new = (column >= K) & (j < K)
    node = tl.load(path + ib * P + column - K, mask=is_new, other=0)
    history += il * history_l + ib * history_b
    inputs += il * inputs_l + ib * inputs_b
    old = tl.load(history + c[:, None] * history_c + column[None, :] * history_k, mask=tile & (column < K)[None, :], other=0.0)
    new = tl.load(inputs + c[:, None] * inputs_c + node[None, :] * inputs_n, mask=tile & is_new[None, :], other=0.0)
    moved = tl.where(is_new[None, :], new.to(history.dtype.element_ty), old)
    # A thread may store a column that another has yet to read.
    tl.debug_barrier()
    tl.store(history + c[:, None] * history_c + j[None, :] * history_k, moved, mask=tile)
