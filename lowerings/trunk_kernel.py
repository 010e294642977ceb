"""A trunk above a tree: accepted tokens whose state is not written yet, ``S = exp(G) S_0 + sum of exp(G - g_j) k_j u_j^T``.

``S`` is never formed: the products of a block with it are those with ``S_0`` plus products with the trunk's own keys.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product


@triton.jit
def add_trunk(
    kS,  # [BLOCK_V, SLOTS] float32, S_0^T k
    qS,  # [BLOCK_V, SLOTS] float32, S_0^T q
    k,  # [SLOTS, BLOCK_K] float, raw
    q,  # [SLOTS, BLOCK_K] float, raw
    trunk_keys,  # [B, T, HK, K] float, contiguous
    trunk_scale,  # [B, T, HK] float32
    trunk_values,  # [B, T, HV, V] float32
    trunk_decay,  # [B, T, HV] float32
    trunk_length,  # [B] int32
    ib,
    ih,
    c,  # [BLOCK_V] int32
    in_v,  # [BLOCK_V] int1
    T: tl.constexpr,
    HK: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    """Return ``S^T k`` and ``S^T q``."""
    HV: tl.constexpr = HK * GROUPS
    ik = ih // GROUPS
    d = tl.arange(0, BLOCK_K)
    trunk_keys += (ib * T * HK + ik) * K
    trunk_scale += ib * T * HK + ik
    trunk_values += (ib * T * HV + ih) * V
    trunk_decay += ib * T * HV + ih
    length = tl.load(trunk_length + ib)
    end = tl.load(trunk_decay + tl.maximum(length - 1, 0) * HV, mask=length > 0, other=0.0)
    kS *= tl.exp(end)
    qS *= tl.exp(end)
    for start in tl.range(0, length, 16, num_stages=1):
        j = start + tl.arange(0, 16)
        in_trunk = j < length
        k_j = tl.load(trunk_keys + j[:, None] * (HK * K) + d[None, :], mask=in_trunk[:, None] & (d < K)[None, :], other=0.0)
        scale_j = tl.load(trunk_scale + j * HK, mask=in_trunk, other=0.0)
        g_j = tl.load(trunk_decay + j * HV, mask=in_trunk, other=0.0)
        u_j = tl.load(trunk_values + j[None, :] * (HV * V) + c[:, None], mask=in_v[:, None] & in_trunk[None, :], other=0.0)
        weight = tl.where(in_trunk, tl.exp(tl.where(in_trunk, end - g_j, 0.0)) * scale_j, 0.0)
        zero = tl.zeros([16, k.shape[0]], tl.float32)
        KK = exact_product(k_j, tl.trans(k), zero, PRECISION) * weight[:, None]
        KQ = exact_product(k_j, tl.trans(q), zero, PRECISION) * weight[:, None]
        kS = exact_product(u_j, KK, kS, SOLVE_PRECISION)
        qS = exact_product(u_j, KQ, qS, SOLVE_PRECISION)
    return kS, qS
