"""Close the gaps of the accepted path in the attention caches of all layers, in place: row length + path[p] to length + p.

One program owns one (layer, batch row, head) and walks the path 16 steps at a time. ``path[p] >= p`` and increasing, so a
step's source lies behind every target before it: within 16 steps all reads come before all writes, and no later read can
meet an earlier write. It moves 2 D elements a step, twice: bytes bound it, and at verify sizes its launch.
"""

import triton
import triton.language as tl


@triton.jit
def commit_keys_values_kernel(
    keys,  # [L, B, H, T, D] float, any strides, overwritten
    values,  # [L, B, H, T, E] float, any strides, overwritten
    lengths,  # [B] int64
    path,  # [B, P] int32, contiguous, -1 after the accepted node
    keys_l,
    keys_b,
    keys_h,
    keys_t,
    keys_d,
    values_l,
    values_b,
    values_h,
    values_t,
    values_d,
    B,
    H,
    T,
    P,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_P: tl.constexpr,  # power of two >= P
    BLOCK_D: tl.constexpr,  # power of two >= D
    BLOCK_E: tl.constexpr,  # power of two >= E
):
    ih = tl.program_id(0) % H
    ib = (tl.program_id(0) // H % B).to(tl.int64)
    il = (tl.program_id(0) // H // B).to(tl.int64)

    p = tl.arange(0, BLOCK_P)
    count = tl.sum((tl.load(path + ib * P + p, mask=p < P, other=-1) >= 0).to(tl.int32), 0)
    length = tl.load(lengths + ib)
    keys += il * keys_l + ib * keys_b + ih * keys_h
    values += il * values_l + ib * values_b + ih * values_h
    i = tl.arange(0, 16)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    for start in tl.range(0, count, 16, num_stages=1):
        step = start + i
        source = length + tl.load(path + ib * P + step, mask=step < count, other=0)  # [16]
        target = length + step
        moves = ((step < count) & (source < T))[:, None]
        k = tl.load(keys + source[:, None] * keys_t + d[None, :] * keys_d, mask=moves & (d < D)[None, :], other=0.0)
        v = tl.load(values + source[:, None] * values_t + e[None, :] * values_d, mask=moves & (e < E)[None, :], other=0.0)
        tl.debug_barrier()
        tl.store(keys + target[:, None] * keys_t + d[None, :] * keys_d, k, mask=moves & (d < D)[None, :])
        tl.store(values + target[:, None] * values_t + e[None, :] * values_d, v, mask=moves & (e < E)[None, :])
        tl.debug_barrier()
