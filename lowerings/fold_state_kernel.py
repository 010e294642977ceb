"""Fold a trunk into the state of one layer, in place: ``S = exp(G) S + sum over the trunk of exp(G - g_j) k_j u_j^T``.

For trees that the fused kernel does not take; the verify kernel follows in a launch of its own. One program owns one (batch
row, value head) and BLOCK_V value columns, transposed: it reads and writes 4 K BLOCK_V bytes, which bounds it, and walks the
trunk 16 tokens at a time. A row whose trunk is empty keeps its state untouched.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.fold_trunk_kernel import add_steps
from treewy_inductor.lowerings.trunk_kernel import trunk_end


@triton.jit
def fold_state_kernel(
    state,  # [B, HV, K, V] float, any strides, overwritten
    trunk_keys,  # [B, T, HK, K] float, contiguous, as are the next four
    trunk_scale,  # [B, T, HK] float32
    trunk_values,  # [B, T, HV, V] float32
    trunk_decay,  # [B, T, HV] float32
    trunk_length,  # [B] int32
    state_b,
    state_h,
    state_k,
    state_v,
    T: tl.constexpr,
    HK: tl.constexpr,
    GROUPS: tl.constexpr,  # value heads a key head
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K
    PRECISION: tl.constexpr,
):
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HV: tl.constexpr = HK * GROUPS
    ih = tl.program_id(0) // V_BLOCKS % HV
    ib = (tl.program_id(0) // (V_BLOCKS * HV)).to(tl.int64)
    ik = ih // GROUPS
    length = tl.load(trunk_length + ib)
    if length == 0:
        return

    c = tl.program_id(0) % V_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_K)
    i = tl.arange(0, 16)
    in_v = c < V
    in_k = d < K
    cells = state + ib * state_b + ih * state_h + c[:, None] * state_v + d[None, :] * state_k
    in_state = in_v[:, None] & in_k[None, :]
    S = tl.load(cells, mask=in_state, other=0.0)
    end = trunk_end(trunk_decay, length, ib, ih, T, HV)
    # Apart from S, so that the products are made while it is on its way.
    added = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    for start in tl.range(0, length, 16, num_stages=1):
        added = add_steps(
            *(added, end, start + i, start + i < length),
            *(trunk_keys + (ib * T * HK + ik) * K, trunk_scale + ib * T * HK + ik),
            *(trunk_values + (ib * T * HV + ih) * V, trunk_decay + ib * T * HV + ih),
            *(HK * K, HK, HV * V, HV, c, in_v, d, in_k, PRECISION),
        )
    S = S.to(tl.float32) * tl.exp(end) + added
    tl.store(cells, S.to(state.dtype.element_ty), mask=in_state)
