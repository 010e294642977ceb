"""What a tree does to any value column: per head and block J of 16 internal nodes, two ``[N, 16]`` operators.

    G[t,i] = beta_t exp(g_t - g_i) (k_t . k_i)      P[t,i] = exp(g_t - g_i) (q_t . k_i), own term included
    T_J    = (I + G_JJ)^-1 = (I - G_JJ)(I + G_JJ^2)(I + G_JJ^4)...     exact once 2^steps >= height, since G^height = 0
    correction_J = -G[:,J] T_J                      readout_J = P[:,J] T_J

The verify kernel then runs ``O += readout_J R_J; R += correction_J R_J`` over the blocks, after which R is U: leaves are
nobody's ancestor, so blocks cover internal nodes alone (they come first in ``order``). Slots are positions in ``order``.

One program owns one (batch row, key head) and every LANES-th block: the products of keys are made once and shared by the
head's value heads. It reads 2 N K elements a block and writes 128 N bytes a block and value head, all in L2. At 40 nodes
and K = 128 that is 0.5 MFLOP a block: the chain of dependent 16 x 16 products bounds it, hence many small programs.
"""

import triton
import triton.language as tl

from treewy_inductor.lowerings.exact_product_kernel import exact_product, is_ancestor


@triton.jit
def path_decays(
    log_decay,  # [N] at stride log_decay_n, of this row and head
    log_decay_n,
    ancestors,  # [N, W] int64
    order,  # [N] int32
    node,  # [R] int32
    is_node,  # [R] int1
    N,
    W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return ``g_t``, the sum of log decays over node t and its ancestors, ``[R]`` float32."""
    g = tl.zeros_like(node).to(tl.float32)
    for start in tl.range(0, BLOCK_N, COLUMNS, num_stages=1):
        slot = start + tl.arange(0, COLUMNS)
        is_above = slot < N
        above = tl.load(order + slot, mask=is_above, other=0)
        log_a = tl.load(log_decay + above * log_decay_n, mask=is_above, other=0.0).to(tl.float32)
        A = is_ancestor(ancestors, node, is_node, above, is_above, W)
        g += tl.sum(tl.where(A, log_a[None, :], 0.0), 1)
    return g


@triton.jit
def nilpotent_inverse(
    G,  # [16, 16] float32, strictly lower triangular
    height,  # int32 scalar, G^height = 0
    PRECISION: tl.constexpr,
):
    """Return ``(I + G)^-1``, ``[16, 16]`` float32, in about log2(height) squarings."""
    i = tl.arange(0, 16)
    T = tl.where(i[:, None] == i[None, :], 1.0, -G)
    power = G
    span = 2
    while span < tl.minimum(height, 16):
        power = exact_product(power, power, tl.zeros([16, 16], tl.float32), PRECISION)
        T = exact_product(T, power, T, PRECISION)
        span *= 2
    return T


@triton.jit
def tree_operators_kernel(
    query,  # [B, N, HK, K] float, stride 1 along K
    key,  # [B, N, HK, K] float, stride 1 along K
    log_decay,  # [B, N, HV] float
    beta,  # [B, N, HV] float
    ancestors,  # [B, N, W] int64, contiguous
    order,  # [B, N] int32, contiguous
    internal,  # [B] int32
    height,  # [B] int32
    operators,  # [B, HV, BLOCK_N/16, 2, 16, BLOCK_N] float32 out: correction, readout, slots innermost
    factors,  # [B, HV, 4, BLOCK_N] float32 out, by slot: of k^T S in R, of q^T S in O, of U in O, beta; 0 at inert nodes
    path_decay,  # [B, N, HV] float32 out
    key_scale,  # [B, N, HK] float32 out
    query_b,
    query_n,
    query_h,
    key_b,
    key_n,
    key_h,
    log_decay_b,
    log_decay_n,
    log_decay_h,
    beta_b,
    beta_n,
    beta_h,
    N,
    K,
    SCALE: tl.constexpr,
    NORM_EPS: tl.constexpr,  # negative: query and key come normalised
    HK: tl.constexpr,
    GROUPS: tl.constexpr,  # value heads a key head
    W: tl.constexpr,
    LANES: tl.constexpr,  # programs that share the blocks of one (row, key head)
    BLOCK_N: tl.constexpr,  # power of two >= max(N, 16)
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,  # ancestors looked at together in the path sums, divides BLOCK_N
    PRECISION: tl.constexpr,  # of products with raw keys
    SOLVE_PRECISION: tl.constexpr,  # of products of float32 with float32
):
    lane = tl.program_id(0) % LANES
    ik = tl.program_id(0) // LANES % HK
    ib = (tl.program_id(0) // (LANES * HK)).to(tl.int64)
    HV: tl.constexpr = HK * GROUPS

    slot = tl.arange(0, BLOCK_N)
    in_row = slot < N
    order += ib * N
    ancestors += ib * N * W
    node = tl.load(order + slot, mask=in_row, other=0)
    own_word = tl.load(ancestors + node * W + node // 64, mask=in_row, other=0)
    is_live = ((own_word >> (node % 64).to(tl.int64)) & 1) != 0
    height = tl.load(height + ib)
    blocks = tl.cdiv(tl.load(internal + ib), 16)

    i = tl.arange(0, 16)
    d = tl.arange(0, BLOCK_K)
    query += ib * query_b + ik * query_h
    key += ib * key_b + ik * key_h
    # Block 0 also writes what does not depend on blocks, so it runs in a tree without internal nodes too.
    for block in tl.range(lane, tl.maximum(blocks, 1), LANES, num_stages=1):
        slot_J = block * 16 + i
        in_row_J = slot_J < N
        node_J = tl.load(order + slot_J, mask=in_row_J, other=0)

        KK = tl.zeros([BLOCK_N, 16], tl.float32)
        QK = tl.zeros([BLOCK_N, 16], tl.float32)
        KK_J = tl.zeros([16, 16], tl.float32)
        kk = tl.zeros([BLOCK_N], tl.float32)
        qq = tl.zeros([BLOCK_N], tl.float32)
        qk = tl.zeros([BLOCK_N], tl.float32)
        kk_J = tl.zeros([16], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=1):
            in_k = (start + d < K)[None, :]
            q = tl.load(query + node[:, None] * query_n + start + d[None, :], mask=in_row[:, None] & in_k, other=0.0)
            k = tl.load(key + node[:, None] * key_n + start + d[None, :], mask=in_row[:, None] & in_k, other=0.0)
            k_J = tl.load(key + node_J[:, None] * key_n + start + d[None, :], mask=in_row_J[:, None] & in_k, other=0.0)
            KK = exact_product(k, tl.trans(k_J), KK, PRECISION)
            QK = exact_product(q, tl.trans(k_J), QK, PRECISION)
            KK_J = exact_product(k_J, tl.trans(k_J), KK_J, PRECISION)
            q = q.to(tl.float32)
            k = k.to(tl.float32)
            k_J = k_J.to(tl.float32)
            qq += tl.sum(q * q, 1)
            kk += tl.sum(k * k, 1)
            qk += tl.sum(q * k, 1)
            kk_J += tl.sum(k_J * k_J, 1)
        if NORM_EPS >= 0:
            q_scale = tl.rsqrt(qq + NORM_EPS) * SCALE
            k_scale = tl.rsqrt(kk + NORM_EPS)
            k_scale_J = tl.rsqrt(kk_J + NORM_EPS)
        else:
            q_scale = tl.full([BLOCK_N], SCALE, tl.float32)
            k_scale = tl.full([BLOCK_N], 1.0, tl.float32)
            k_scale_J = tl.full([16], 1.0, tl.float32)
        if block == 0:
            tl.store(key_scale + (ib * N + node) * HK + ik, tl.where(is_live, k_scale, 0.0), mask=in_row)

        A = is_ancestor(ancestors, node, is_live, node_J, in_row_J, W)  # [BLOCK_N, 16]
        A_J = is_ancestor(ancestors, node_J, in_row_J, node_J, in_row_J, W)  # [16, 16]
        is_strict = A & (slot[:, None] != slot_J[None, :])
        is_strict_J = A_J & (i[:, None] != i[None, :])
        for group in tl.range(0, GROUPS, num_stages=1):
            ih = ik * GROUPS + group
            log_decay_row = log_decay + ib * log_decay_b + ih * log_decay_h
            beta_row = beta + ib * beta_b + ih * beta_h
            b = tl.load(beta_row + node * beta_n, mask=in_row, other=0.0).to(tl.float32)
            b_J = tl.load(beta_row + node_J * beta_n, mask=in_row_J, other=0.0).to(tl.float32)
            g = path_decays(log_decay_row, log_decay_n, ancestors, order, node, in_row, N, W, BLOCK_N, COLUMNS)
            g_J = path_decays(log_decay_row, log_decay_n, ancestors, order, node_J, in_row_J, N, W, BLOCK_N, COLUMNS)
            if block == 0:
                into = tl.exp(g)
                head = factors + (ib * HV + ih) * 4 * BLOCK_N + slot
                tl.store(head, tl.where(is_live, into * b * k_scale, 0.0))
                tl.store(head + BLOCK_N, tl.where(is_live, into * q_scale, 0.0))
                # The own term of a node that no block covers; a block's readout contains it already.
                tl.store(head + 2 * BLOCK_N, tl.where(is_live & (slot >= blocks * 16), qk * q_scale * k_scale, 0.0))
                tl.store(head + 3 * BLOCK_N, tl.where(is_live, b, 0.0))
                tl.store(path_decay + (ib * N + node) * HV + ih, tl.where(is_live, g, 0.0), mask=in_row)
            D = tl.exp(tl.where(A, g[:, None] - g_J[None, :], 0.0)) * k_scale_J[None, :]
            D_J = tl.exp(tl.where(A_J, g_J[:, None] - g_J[None, :], 0.0)) * k_scale_J[None, :]
            G = tl.where(is_strict, KK * D * (b * k_scale)[:, None], 0.0)
            P = tl.where(A, QK * D * q_scale[:, None], 0.0)
            G_J = tl.where(is_strict_J, KK_J * D_J * (b_J * k_scale_J)[:, None], 0.0)
            T = nilpotent_inverse(G_J, height, SOLVE_PRECISION)
            correction = -exact_product(G, T, tl.zeros([BLOCK_N, 16], tl.float32), SOLVE_PRECISION)
            readout = exact_product(P, T, tl.zeros([BLOCK_N, 16], tl.float32), SOLVE_PRECISION)
            pair = operators + ((ib * HV + ih) * (BLOCK_N // 16) + block) * 32 * BLOCK_N
            cell = i[None, :] * BLOCK_N + slot[:, None]
            tl.store(pair + cell, correction)
            tl.store(pair + 16 * BLOCK_N + cell, readout)
