"""Fold the accepted path into the states of all layers, in place: ``S = exp(g_a) S + sum of exp(g_a - g_i) k_i u_i^T``.

One program owns one (layer, batch row, value head) and BLOCK_V value columns, transposed like the verify kernel. It reads
and writes 4 K BLOCK_V bytes once, and 4 (K + BLOCK_V) a path step: one read plus one write of the states bounds it. The
path is walked 16 steps at a time; a row that accepts nothing keeps its state untouched. FLOPs: 6 K V a step.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product


@triton.jit
def commit_state_kernel(
    state,  # [L, B, HV, K, V] float, any strides, overwritten
    keys,  # [L, B, N, HK, K] float, stride 1 along K
    key_scale,  # [L, B, N, HK] float32, stride 1 along HK
    pseudo_values,  # [L, B, N, HV, V] float32, stride 1 along V
    path_decay,  # [L, B, N, HV] float32, stride 1 along HV
    path,  # [B, P] int32, contiguous, root first, -1 after the accepted node
    state_l,
    state_b,
    state_h,
    state_k,
    state_v,
    keys_l,
    keys_b,
    keys_n,
    keys_h,
    key_scale_l,
    key_scale_b,
    key_scale_n,
    pseudo_values_l,
    pseudo_values_b,
    pseudo_values_n,
    pseudo_values_h,
    path_decay_l,
    path_decay_b,
    path_decay_n,
    B,
    P,
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

    p = tl.arange(0, BLOCK_P)
    steps = tl.load(path + ib * P + p, mask=p < P, other=-1)
    count = tl.sum((steps >= 0).to(tl.int32), 0)
    if count == 0:
        return
    last = tl.sum(tl.where(p == count - 1, steps, 0), 0)

    c = iv * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_K)
    i = tl.arange(0, 16)
    in_v = c < V
    in_k = d < K
    cells = state + il * state_l + ib * state_b + ih * state_h + c[:, None] * state_v + d[None, :] * state_k
    tile = in_v[:, None] & in_k[None, :]
    keys += il * keys_l + ib * keys_b + ih // GROUPS * keys_h
    key_scale += il * key_scale_l + ib * key_scale_b + ih // GROUPS
    pseudo_values += il * pseudo_values_l + ib * pseudo_values_b + ih * pseudo_values_h
    path_decay += il * path_decay_l + ib * path_decay_b + ih
    S = tl.load(cells) if BLOCK_K == K and V % BLOCK_V == 0 else tl.load(cells, mask=tile, other=0.0)
    g_a = tl.load(path_decay + last * path_decay_n)
    # Apart from S, so that the products are made while it is on its way.
    added = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    for start in tl.range(0, count, 16, num_stages=1):
        on_path = start + i < count
        node = tl.load(path + ib * P + start + i, mask=on_path, other=0)
        g = tl.load(path_decay + node * path_decay_n, mask=on_path, other=0.0)
        k_scale = tl.load(key_scale + node * key_scale_n, mask=on_path, other=0.0)
        k = tl.load(keys + node[:, None] * keys_n + d[None, :], mask=on_path[:, None] & in_k[None, :], other=0.0)
        u = tl.load(
            pseudo_values + node[None, :] * pseudo_values_n + c[:, None], mask=in_v[:, None] & on_path[None, :], other=0.0
        )
        weight = tl.where(on_path, tl.exp(tl.where(on_path, g_a - g, 0.0)) * k_scale, 0.0)
        added = exact_product(u * weight[None, :], k, added, PRECISION)
    S = S.to(tl.float32) * tl.exp(g_a) + added
    if BLOCK_K == K and V % BLOCK_V == 0:
        tl.store(cells, S.to(state.dtype.element_ty))
    else:
        tl.store(cells, S.to(state.dtype.element_ty), mask=tile)
