"""Append the accepted path of each row that has room for it to the row's trunk, then note how long the trunks are.

Commits are deferred because this moves 4 (K + V) bytes a step and head instead of the 8 K V of a state. One program owns one
(layer, batch row) and BLOCK_U of the HV V value channels, with its share of the HK K key channels: a slot of the trunk and a
node's leavings are contiguous over heads, so few programs copy whole lines. Latency bounds it, bytes do not.
"""

import triton
import triton.language as tl


@triton.jit
def append_trunk_kernel(
    trunk_keys,  # [L, B, T, HK, K] float, each layer contiguous, as in all that have layers; overwritten like the next three
    trunk_scale,  # [L, B, T, HK] float32
    trunk_values,  # [L, B, T, HV, V] float32
    trunk_decay,  # [L, B, T, HV] float32
    trunk_length,  # [B] int32
    keys,  # [L, B, N, HK, K] like trunk_keys
    key_scale,  # [L, B, N, HK] float32
    pseudo_values,  # [L, B, N, HV, V] float32
    path_decay,  # [L, B, N, HV] float32
    path,  # [B, P] int32, contiguous, root first, -1 after the accepted node
    trunk_keys_l,
    trunk_scale_l,
    trunk_values_l,
    trunk_decay_l,
    keys_l,
    key_scale_l,
    pseudo_values_l,
    path_decay_l,
    B,
    N,
    P,
    T: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_P: tl.constexpr,  # power of two >= P
    BLOCK_U: tl.constexpr,  # value channels a program
    BLOCK_K: tl.constexpr,  # key channels a program, as many programs a row cover HK K
    BLOCK_HV: tl.constexpr,  # power of two >= HV
    BLOCK_HK: tl.constexpr,  # power of two >= HK
):
    PROGRAMS: tl.constexpr = (HV * V + BLOCK_U - 1) // BLOCK_U
    part = tl.program_id(0) % PROGRAMS
    ib = (tl.program_id(0) // PROGRAMS % B).to(tl.int64)
    il = (tl.program_id(0) // PROGRAMS // B).to(tl.int64)

    p = tl.arange(0, BLOCK_P)
    length = tl.load(trunk_length + ib)
    count = tl.sum((tl.load(path + ib * P + p, mask=p < P, other=-1) >= 0).to(tl.int32), 0)
    if length + count > T:
        return

    trunk_keys += il * trunk_keys_l
    trunk_scale += il * trunk_scale_l
    trunk_values += il * trunk_values_l
    trunk_decay += il * trunk_decay_l
    keys += il * keys_l
    key_scale += il * key_scale_l
    pseudo_values += il * pseudo_values_l
    path_decay += il * path_decay_l
    cu = part * BLOCK_U + tl.arange(0, BLOCK_U)
    ck = part * BLOCK_K + tl.arange(0, BLOCK_K)
    hv = tl.arange(0, BLOCK_HV)
    hk = tl.arange(0, BLOCK_HK)
    for start in tl.range(0, count, 4, num_stages=1):
        i = start + tl.arange(0, 4)
        is_step = (i < count)[:, None]
        node = ib * N + tl.load(path + ib * P + i, mask=i < count, other=0)
        slot = ib * T + length + i
        in_u = is_step & (cu < HV * V)[None, :]
        in_k = is_step & (ck < HK * K)[None, :]
        u = tl.load(pseudo_values + (node * (HV * V))[:, None] + cu[None, :], mask=in_u)
        k = tl.load(keys + (node * (HK * K))[:, None] + ck[None, :], mask=in_k)
        tl.store(trunk_values + (slot * (HV * V))[:, None] + cu[None, :], u, mask=in_u)
        tl.store(trunk_keys + (slot * (HK * K))[:, None] + ck[None, :], k, mask=in_k)
        if part == 0:
            in_g = is_step & (hv < HV)[None, :]
            in_scale = is_step & (hk < HK)[None, :]
            last = tl.maximum(length - 1, 0)
            G = tl.load(trunk_decay + (ib * T + last) * HV + hv, mask=hv < HV, other=0.0)
            # Chosen, not multiplied: an empty trunk may hold NaN.
            G = tl.where(length > 0, G, 0.0)
            g = tl.load(path_decay + (node * HV)[:, None] + hv[None, :], mask=in_g)
            scale = tl.load(key_scale + (node * HK)[:, None] + hk[None, :], mask=in_scale)
            tl.store(trunk_decay + (slot * HV)[:, None] + hv[None, :], G[None, :] + g, mask=in_g)
            tl.store(trunk_scale + (slot * HK)[:, None] + hk[None, :], scale, mask=in_scale)


@triton.jit
def trunk_length_kernel(
    trunk_length,  # [B] int32, overwritten
    path,  # [B, P] int32, contiguous
    P,
    T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Note how many slots are in use once every program of the other kernels has read how many were."""
    ib = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    count = tl.sum((tl.load(path + ib * P + p, mask=p < P, other=-1) >= 0).to(tl.int32), 0)
    length = tl.load(trunk_length + ib) + count
    tl.store(trunk_length + ib, tl.where(length <= T, length, 0))
