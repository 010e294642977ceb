"""Append the accepted path to each row's trunk, or fold trunk and path into the states of all layers, in place.

    fold    S = exp(G + g_a) S + sum over the trunk of exp(G + g_a - g_j) k_j u_j^T
                               + sum over the path of exp(g_a - g_i) k_i u_i^T

``G`` is the trunk's last path decay. One program owns one (layer, batch row, value head) and BLOCK_V value columns. A row
whose path fits the trunk copies 4 (K + V) bytes a step and head and leaves its state alone, which is why commits are
deferred; a row that folds reads and writes 4 K V bytes a head once for all of them.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product


@triton.jit
def add_steps(
    added,  # [BLOCK_V, BLOCK_K] float32
    end,  # float32 scalar, path decay of the last step
    node,  # [16] int32
    is_step,  # [16] int1
    keys,  # of this layer, row and head, as are the next three
    key_scale,
    values,
    decays,
    keys_n,
    key_scale_n,
    values_n,
    decays_n,
    c,  # [BLOCK_V] int32
    in_v,
    d,  # [BLOCK_K] int32
    in_k,
    PRECISION: tl.constexpr,
):
    """Return ``added + sum of exp(end - g_i) k_i u_i^T`` over 16 steps of a path."""
    g = tl.load(decays + node * decays_n, mask=is_step, other=0.0)
    k_scale = tl.load(key_scale + node * key_scale_n, mask=is_step, other=0.0)
    k = tl.load(keys + node[:, None] * keys_n + d[None, :], mask=is_step[:, None] & in_k[None, :], other=0.0)
    u = tl.load(values + node[None, :] * values_n + c[:, None], mask=in_v[:, None] & is_step[None, :], other=0.0)
    weight = tl.where(is_step, tl.exp(tl.where(is_step, end - g, 0.0)) * k_scale, 0.0)
    return exact_product(u * weight[None, :], k, added, PRECISION)


@triton.jit
def commit_trunk_kernel(
    state,  # [L, B, HV, K, V] float, any strides, overwritten
    trunk_keys,  # [L, B, T, HK, K] float, contiguous, overwritten like the next three
    trunk_scale,  # [L, B, T, HK] float32, contiguous
    trunk_values,  # [L, B, T, HV, V] float32, contiguous
    trunk_decay,  # [L, B, T, HV] float32, contiguous
    trunk_length,  # [B] int32
    keys,  # [L, B, N, HK, K] like trunk_keys, contiguous
    key_scale,  # [L, B, N, HK] float32, contiguous
    pseudo_values,  # [L, B, N, HV, V] float32, contiguous
    path_decay,  # [L, B, N, HV] float32, contiguous
    path,  # [B, P] int32, contiguous, root first, -1 after the accepted node
    state_l,
    state_b,
    state_h,
    state_k,
    state_v,
    B,
    N,
    P,
    T: tl.constexpr,
    HK: tl.constexpr,
    GROUPS: tl.constexpr,  # value heads a key head
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_P: tl.constexpr,  # power of two >= P
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K
    PRECISION: tl.constexpr,
):
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HV: tl.constexpr = HK * GROUPS
    iv = tl.program_id(0) % V_BLOCKS
    ih = tl.program_id(0) // V_BLOCKS % HV
    ib = (tl.program_id(0) // (V_BLOCKS * HV) % B).to(tl.int64)
    il = (tl.program_id(0) // (V_BLOCKS * HV) // B).to(tl.int64)
    ik = ih // GROUPS

    p = tl.arange(0, BLOCK_P)
    steps = tl.load(path + ib * P + p, mask=p < P, other=-1)
    length = tl.load(trunk_length + ib)
    count = tl.sum((steps >= 0).to(tl.int32), 0)
    if count == 0:
        return

    c = iv * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_K)
    i = tl.arange(0, 16)
    in_v = c < V
    in_k = d < K
    row = il * B + ib
    trunk_keys += (row * T * HK + ik) * K
    trunk_scale += row * T * HK + ik
    trunk_values += (row * T * HV + ih) * V
    trunk_decay += row * T * HV + ih
    keys += (row * N * HK + ik) * K
    key_scale += row * N * HK + ik
    pseudo_values += (row * N * HV + ih) * V
    path_decay += row * N * HV + ih
    has_trunk = length > 0
    G = tl.load(trunk_decay + tl.maximum(length - 1, 0) * HV, mask=has_trunk, other=0.0)

    if length + count <= T:
        for start in tl.range(0, count, 16, num_stages=1):
            is_step = start + i < count
            node = tl.load(path + ib * P + start + i, mask=is_step, other=0)
            slot = length + start + i
            u = tl.load(pseudo_values + node[:, None] * (HV * V) + c[None, :], mask=is_step[:, None] & in_v[None, :], other=0.0)
            tl.store(trunk_values + slot[:, None] * (HV * V) + c[None, :], u, mask=is_step[:, None] & in_v[None, :])
            if iv == 0:
                g = tl.load(path_decay + node * HV, mask=is_step, other=0.0)
                tl.store(trunk_decay + slot * HV, G + g, mask=is_step)
                if ih % GROUPS == 0:
                    k_scale = tl.load(key_scale + node * HK, mask=is_step, other=0.0)
                    tl.store(trunk_scale + slot * HK, k_scale, mask=is_step)
                    cell = is_step[:, None] & in_k[None, :]
                    k = tl.load(keys + node[:, None] * (HK * K) + d[None, :], mask=cell, other=0.0)
                    tl.store(trunk_keys + slot[:, None] * (HK * K) + d[None, :], k, mask=cell)
    else:
        cells = state + il * state_l + ib * state_b + ih * state_h + c[:, None] * state_v + d[None, :] * state_k
        tile = in_v[:, None] & in_k[None, :]
        IS_WHOLE: tl.constexpr = BLOCK_K == K and V % BLOCK_V == 0
        S = tl.load(cells) if IS_WHOLE else tl.load(cells, mask=tile, other=0.0)
        last = tl.sum(tl.where(p == count - 1, steps, 0), 0)
        g_a = tl.load(path_decay + last * HV)
        # Apart from S, so that the products are made while it is on its way.
        added = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
        for start in tl.range(0, length, 16, num_stages=1):
            added = add_steps(
                *(added, G + g_a, start + i, start + i < length, trunk_keys, trunk_scale, trunk_values, trunk_decay),
                *(HK * K, HK, HV * V, HV, c, in_v, d, in_k, PRECISION),
            )
        for start in tl.range(0, count, 16, num_stages=1):
            is_step = start + i < count
            node = tl.load(path + ib * P + start + i, mask=is_step, other=0)
            added = add_steps(
                *(added, g_a, node, is_step, keys, key_scale, pseudo_values, path_decay),
                *(HK * K, HK, HV * V, HV, c, in_v, d, in_k, PRECISION),
            )
        S = S.to(tl.float32) * tl.exp(G + g_a) + added
        if IS_WHOLE:
            tl.store(cells, S.to(state.dtype.element_ty))
        else:
            tl.store(cells, S.to(state.dtype.element_ty), mask=tile)


@triton.jit
def trunk_length_kernel(
    trunk_length,  # [B] int32, overwritten
    path,  # [B, P] int32, contiguous
    P,
    T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Note how many slots are in use after :func:`commit_trunk_kernel`, which every program of it had to read before."""
    ib = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    count = tl.sum((tl.load(path + ib * P + p, mask=p < P, other=-1) >= 0).to(tl.int32), 0)
    length = tl.load(trunk_length + ib) + count
    tl.store(trunk_length + ib, tl.where(length <= T, length, 0))
