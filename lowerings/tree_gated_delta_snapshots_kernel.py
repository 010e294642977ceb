"""Walk a tree node by node and write every node's state: ``S_t = a_t S_p + k_t u_t^T``, ``u_t = b_t (v_t - a_t S_p^T k_t)``.

    o_t = S_t^T q_t = a_t S_p^T q_t + (k_t . q_t) u_t

One program owns one (batch row, value head) and BLOCK_V value columns, transposed like the other kernels of states. A node
whose parent is the node before it finds the parent's state in registers, any other reads it back; the committed state stays
in registers for the roots, since its block may be overwritten. A program reads 4 K BLOCK_V bytes and writes as many a node,
which bounds it: K V N cells a head, where a tree solved at once writes V N.
"""

import triton
import triton.language as tl


@triton.jit
def load_block(
    cells,  # [BLOCK_V, BLOCK_K] pointers
    tile,  # [BLOCK_V, BLOCK_K] int1
    IS_WHOLE: tl.constexpr,  # all cells exist
):
    """Return a block of a state, ``[BLOCK_V, BLOCK_K]`` float32."""
    S = tl.load(cells) if IS_WHOLE else tl.load(cells, mask=tile, other=0.0)
    return S.to(tl.float32)


@triton.jit
def tree_gated_delta_snapshots_kernel(
    query,  # [B, N, HK, K] float, stride 1 along K
    key,  # [B, N, HK, K] float, stride 1 along K
    value,  # [B, N, HV, V] float, stride 1 along V
    log_decay,  # [B, N, HV] float
    beta,  # [B, N, HV] float
    parents,  # [B, N] int32, contiguous
    accepted,  # [B] int32, block of the committed state; -1: it is lost
    snapshots,  # [B, N, HV, K, V] float, any strides, overwritten
    output,  # [B, N, HV, V] float out, contiguous
    query_b,
    query_n,
    query_h,
    key_b,
    key_n,
    key_h,
    value_b,
    value_n,
    value_h,
    log_decay_b,
    log_decay_n,
    log_decay_h,
    beta_b,
    beta_n,
    beta_h,
    snapshots_b,
    snapshots_n,
    snapshots_h,
    snapshots_k,
    snapshots_v,
    N,
    SCALE: tl.constexpr,
    NORM_EPS: tl.constexpr,  # negative: query and key come normalised
    HK: tl.constexpr,
    GROUPS: tl.constexpr,  # value heads a key head
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K
):
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HV: tl.constexpr = HK * GROUPS
    iv = tl.program_id(0) % V_BLOCKS
    ih = tl.program_id(0) // V_BLOCKS % HV
    ib = (tl.program_id(0) // (V_BLOCKS * HV)).to(tl.int64)

    c = iv * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_K)
    in_k = d < K
    in_v = c < V
    tile = in_v[:, None] & in_k[None, :]
    IS_WHOLE: tl.constexpr = BLOCK_K == K and V % BLOCK_V == 0
    cells = snapshots + ib * snapshots_b + ih * snapshots_h + c[:, None] * snapshots_v + d[None, :] * snapshots_k
    parents += ib * N
    query += ib * query_b + ih // GROUPS * query_h
    key += ib * key_b + ih // GROUPS * key_h
    value += ib * value_b + ih * value_h
    log_decay += ib * log_decay_b + ih * log_decay_h
    beta += ib * beta_b + ih * beta_h
    output += (ib * N * HV + ih) * V
    committed = tl.load(accepted + ib).to(tl.int64)
    S_0 = load_block(cells + tl.maximum(committed, 0) * snapshots_n, tile, IS_WHOLE)
    S_0 = tl.where(committed < 0, float("nan"), S_0)
    # No program writes a block before all its lanes hold the committed state.
    tl.debug_barrier()
    S = S_0
    for t in range(N):
        parent = tl.load(parents + t)
        if parent >= -1:
            # Asked for before the parent's state, which may have to come from memory.
            k = tl.load(key + t * key_n + d, mask=in_k, other=0.0).to(tl.float32)
            q = tl.load(query + t * query_n + d, mask=in_k, other=0.0).to(tl.float32)
            v = tl.load(value + t * value_n + c, mask=in_v, other=0.0).to(tl.float32)
            b = tl.load(beta + t * beta_n).to(tl.float32)
            a = tl.exp(tl.load(log_decay + t * log_decay_n).to(tl.float32))
            if parent < 0:
                S = S_0
            elif parent != t - 1:
                tl.debug_barrier()
                S = load_block(cells + parent * snapshots_n, tile, IS_WHOLE)
            if NORM_EPS >= 0:
                k = k * tl.rsqrt(tl.sum(k * k, 0) + NORM_EPS)
                q = q * tl.rsqrt(tl.sum(q * q, 0) + NORM_EPS)
            # Both products with the parent's state, so that neither waits for the other.
            u = b * (v - a * tl.sum(S * k[None, :], 1))
            o = (a * tl.sum(S * q[None, :], 1) + u * tl.sum(k * q, 0)) * SCALE
            S = a * S + u[:, None] * k[None, :]
            tl.store(output + t * (HV * V) + c, o.to(output.dtype.element_ty), mask=in_v)
            if IS_WHOLE:
                tl.store(cells + t * snapshots_n, S.to(snapshots.dtype.element_ty))
            else:
                tl.store(cells + t * snapshots_n, S.to(snapshots.dtype.element_ty), mask=tile)
        else:
            tl.store(output + t * (HV * V) + c, tl.zeros([BLOCK_V], output.dtype.element_ty), mask=in_v)
