"""Fold trunk and accepted path of each row whose path does not fit its trunk into the states of all layers, in place.

    S = exp(G + g_a) S + sum over the trunk of exp(G + g_a - g_j) k_j u_j^T + sum over the path of exp(g_a - g_i) k_i u_i^T

``G`` is the trunk's last path decay. One program owns UNITS pairs of (value head, BLOCK_V value columns) of one (layer, batch
row): most rows do not fold, and each of their programs costs what it takes to find that out. A row that folds reads and
writes 4 K V bytes a head once for all its tokens.
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
def fold_trunk_kernel(
    state,  # [L, B, HV, K, V] float, any strides, overwritten
    trunk_keys,  # [L, B, T, HK, K] float, each layer contiguous, as in all that follow and have layers
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
    UNITS: tl.constexpr,  # divides HV times the blocks of value columns
    BLOCK_P: tl.constexpr,  # power of two >= P
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K
    PRECISION: tl.constexpr,
):
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HV: tl.constexpr = HK * GROUPS
    PROGRAMS: tl.constexpr = HV * V_BLOCKS // UNITS
    ib = (tl.program_id(0) // PROGRAMS % B).to(tl.int64)
    il = (tl.program_id(0) // PROGRAMS // B).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    length = tl.load(trunk_length + ib)
    steps = tl.load(path + ib * P + p, mask=p < P, other=-1)
    count = tl.sum((steps >= 0).to(tl.int32), 0)
    if length + count <= T:
        return

    last = tl.sum(tl.where(p == count - 1, steps, 0), 0)
    d = tl.arange(0, BLOCK_K)
    i = tl.arange(0, 16)
    in_k = d < K
    trunk_keys += il * trunk_keys_l + ib * T * HK * K
    trunk_scale += il * trunk_scale_l + ib * T * HK
    trunk_values += il * trunk_values_l + ib * T * HV * V
    trunk_decay += il * trunk_decay_l + ib * T * HV
    keys += il * keys_l + ib * N * HK * K
    key_scale += il * key_scale_l + ib * N * HK
    pseudo_values += il * pseudo_values_l + ib * N * HV * V
    path_decay += il * path_decay_l + ib * N * HV
    state += il * state_l + ib * state_b
    first = tl.program_id(0) % PROGRAMS * UNITS
    for unit in tl.range(first, first + UNITS, num_stages=1):
        ih = unit // V_BLOCKS
        ik = ih // GROUPS
        c = unit % V_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
        in_v = c < V
        cells = state + ih * state_h + c[:, None] * state_v + d[None, :] * state_k
        tile = in_v[:, None] & in_k[None, :]
        IS_WHOLE: tl.constexpr = BLOCK_K == K and V % BLOCK_V == 0
        S = tl.load(cells) if IS_WHOLE else tl.load(cells, mask=tile, other=0.0)
        G = tl.load(trunk_decay + tl.maximum(length - 1, 0) * HV + ih, mask=length > 0, other=0.0)
        g_a = tl.load(path_decay + last * HV + ih)
        # Apart from S, so that the products are made while it is on its way.
        added = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
        for start in tl.range(0, length, 16, num_stages=1):
            added = add_steps(
                *(added, G + g_a, start + i, start + i < length),
                *(trunk_keys + ik * K, trunk_scale + ik, trunk_values + ih * V, trunk_decay + ih),
                *(HK * K, HK, HV * V, HV, c, in_v, d, in_k, PRECISION),
            )
        for start in tl.range(0, count, 16, num_stages=1):
            is_step = start + i < count
            node = tl.load(path + ib * P + start + i, mask=is_step, other=0)
            added = add_steps(
                *(added, g_a, node, is_step),
                *(keys + ik * K, key_scale + ik, pseudo_values + ih * V, path_decay + ih),
                *(HK * K, HK, HV * V, HV, c, in_v, d, in_k, PRECISION),
            )
        S = S.to(tl.float32) * tl.exp(G + g_a) + added
        if IS_WHOLE:
            tl.store(cells, S.to(state.dtype.element_ty))
        else:
            tl.store(cells, S.to(state.dtype.element_ty), mask=tile)
