"""Softmax attention of a draft tree's nodes over their row's committed positions, their ancestors and themselves.

    o_t = sum over p of softmax(scale q_t . k_p) v_p        p < length, or p = length + i with node i in A(t)

One program owns one (batch row, key head), BLOCK_M rows of its M = N GROUPS pairs of node and query head, and one of SPLITS
parts of the positions. The parts are cut on the device from the row's own length, so that the work follows the length and
not the cache's size while the grid stays the same. All blocks of BLOCK_L positions but the last few hold committed tokens
alone and need no mask; in the others a row sees the bits of one word, put together from its ancestor bits.

A program reads (D + E) BLOCK_L elements a block and multiplies 2 (D + E) BLOCK_L BLOCK_M FLOP: at 64 rows of bfloat16 that is
64 FLOP a byte, so that a few programs a multiprocessor are bound by the cache's bytes and many by the matrix units.
"""

import triton
import triton.language as tl


@triton.jit
def _query_part(
    q_rows,  # [BLOCK_M] pointers
    is_row,  # [BLOCK_M] bool
    FIRST: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    d = FIRST + tl.arange(0, CHUNK)
    return tl.load(q_rows[:, None] + d[None, :], mask=is_row[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _dot_of_rows(
    q,  # four parts [BLOCK_M, CHUNK], used if HELD
    q_rows,  # [BLOCK_M] pointers
    k_rows,  # [BLOCK_L] pointers
    is_row,  # [BLOCK_M] bool
    is_held,  # [BLOCK_L] bool
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    for part in tl.static_range(0, BLOCK_D // CHUNK):
        d = part * CHUNK + tl.arange(0, CHUNK)
        if HELD:
            q_part = q[0] if part == 0 else (q[1] if part == 1 else (q[2] if part == 2 else q[3]))
        else:
            q_part = tl.load(q_rows[:, None] + d[None, :], mask=is_row[:, None] & (d < D)[None, :], other=0.0, volatile=True)
        k = tl.load(k_rows[:, None] + d[None, :], mask=is_held[:, None] & (d < D)[None, :], other=0.0)
        if part == 0:
            s = tl.dot(q_part, tl.trans(k), input_precision=PRECISION)
        else:
            s = tl.dot(q_part, tl.trans(k), s, input_precision=PRECISION)
    return s


@triton.jit
def _take_in(
    s,  # [BLOCK_M, BLOCK_L] float32, scores in units of log 2, -inf where not seen
    v,  # [BLOCK_L, BLOCK_E] float
    top,  # [BLOCK_M] float32, the largest score so far
    total,  # [BLOCK_M] float32
    acc,  # [BLOCK_M, BLOCK_E] float32
    PRECISION: tl.constexpr,
):
    higher = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - higher[:, None])
    shrink = tl.exp2(top - higher)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return higher, total * shrink + tl.sum(p, 1), acc


@triton.jit
def _seen_bits(
    ancestors,  # [BLOCK_M] pointers to the rows' first words
    ancestors_w,
    node,  # of the block's first position, negative before the tree
    W: tl.constexpr,
):
    """Return ``[BLOCK_M]`` uint64: bit j is set where a row sees position j of the block, committed or an ancestor."""
    inside = tl.maximum(node, 0)
    before = tl.maximum(-node, 0).to(tl.uint64)
    word = inside // 64
    shift = (inside % 64).to(tl.uint64)
    low = tl.load(ancestors + word * ancestors_w).to(tl.uint64, bitcast=True)
    # After the last word no node is held, so its bits may be anything.
    high = tl.load(ancestors + tl.minimum(word + 1, W - 1) * ancestors_w).to(tl.uint64, bitcast=True)
    # By 64 - shift in two steps: a shift by 64 is undefined.
    bits = (low >> shift) | ((high << 1) << (63 - shift))
    one = tl.full([], 1, tl.uint64)
    return (bits << before) | ((one << before) - one)


@triton.jit
def tree_attention_kernel(
    query,  # [B, H, N, D] float, last dim contiguous
    keys,  # [B, HK, L, D] like query, last dim contiguous
    values,  # [B, HK, L, E] like query, last dim contiguous
    ancestors,  # [B, N, W] int64
    lengths,  # [B] int64
    output,  # [B, N, H, E] like query, contiguous; written if SPLITS is 1
    partial,  # [SPLITS, B, N, H, E] float32, contiguous; sums of exp2(score - top) v
    tops,  # [SPLITS, B, N, H] float32
    totals,  # [SPLITS, B, N, H] float32, sums of exp2(score - top)
    query_b,
    query_h,
    query_n,
    keys_b,
    keys_h,
    values_b,
    values_h,
    ancestors_b,
    ancestors_n,
    ancestors_w,
    lengths_b,
    B,
    L,
    keys_l: tl.constexpr,
    values_l: tl.constexpr,
    N: tl.constexpr,
    HK: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SCALE: tl.constexpr,  # times log2(e)
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,  # at most 64
    BLOCK_D: tl.constexpr,  # power of two >= D
    BLOCK_E: tl.constexpr,  # power of two >= E
    CHUNK: tl.constexpr,  # of the key dimension in a product, divides BLOCK_D
    HELD: tl.constexpr,  # whether the queries stay in shared memory, in at most 4 chunks, or are read again for each block
    STAGES: tl.constexpr,  # blocks of the cache in flight
    PRECISION: tl.constexpr,
):
    TILES: tl.constexpr = (N * GROUPS + BLOCK_M - 1) // BLOCK_M
    H: tl.constexpr = HK * GROUPS
    # Programs that read the same part of the cache run side by side.
    tile = tl.program_id(0) % TILES
    split = tl.program_id(0) // TILES % SPLITS
    ihk = tl.program_id(0) // (TILES * SPLITS) % HK
    ib = (tl.program_id(0) // (TILES * SPLITS * HK)).to(tl.int64)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < N * GROUPS
    t = tl.minimum(row // GROUPS, N - 1)  # [BLOCK_M]
    ih = ihk * GROUPS + row % GROUPS
    i = tl.arange(0, BLOCK_L)
    e = tl.arange(0, BLOCK_E)
    length = tl.minimum(tl.load(lengths + ib * lengths_b), L).to(tl.int32)
    end = tl.minimum(length + N, L)
    blocks = (end + BLOCK_L - 1) // BLOCK_L
    share = (blocks + SPLITS - 1) // SPLITS
    first = split * share
    last = tl.minimum(first + share, blocks)
    full = length // BLOCK_L

    ancestors += ib * ancestors_b + t * ancestors_n
    own = tl.load(ancestors + t // 64 * ancestors_w)
    is_node = is_row & (((own >> (t % 64)) & 1) != 0)
    q_rows = query + ib * query_b + ih.to(tl.int64) * query_h + t.to(tl.int64) * query_n
    q = (
        _query_part(q_rows, is_row, 0, D, CHUNK),
        _query_part(q_rows, is_row, CHUNK, D, CHUNK),
        _query_part(q_rows, is_row, 2 * CHUNK, D, CHUNK),
        _query_part(q_rows, is_row, 3 * CHUNK, D, CHUNK),
    )
    keys += ib * keys_b + ihk.to(tl.int64) * keys_h
    values += ib * values_b + ihk.to(tl.int64) * values_h

    # A finite start: a row that has seen nothing yet must not subtract infinity from infinity.
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for block in tl.range(first, tl.minimum(last, full), num_stages=STAGES):
        start = tl.cast(block, tl.int64) * BLOCK_L
        k_rows = keys + start * keys_l + i * keys_l
        s = _dot_of_rows(q, q_rows, k_rows, is_row, i < BLOCK_L, D, BLOCK_M, BLOCK_L, BLOCK_D, CHUNK, HELD, PRECISION) * SCALE
        v = tl.load(values + start * values_l + i[:, None] * values_l + e[None, :], mask=(e < E)[None, :], other=0.0)
        top, total, acc = _take_in(s, v, top, total, acc, PRECISION)
    for block in tl.range(tl.maximum(first, full), last, num_stages=STAGES):
        start = tl.cast(block, tl.int64) * BLOCK_L
        node = block * BLOCK_L - length
        is_held = node + i < end - length
        bits = _seen_bits(ancestors, ancestors_w, node, (N + 63) // 64)
        seen = ((bits[:, None] >> i.to(tl.uint64)[None, :]) & 1) != 0
        k_rows = keys + start * keys_l + i * keys_l
        s = _dot_of_rows(q, q_rows, k_rows, is_row, is_held, D, BLOCK_M, BLOCK_L, BLOCK_D, CHUNK, HELD, PRECISION) * SCALE
        s = tl.where(seen & is_held[None, :], s, float("-inf"))
        v_mask = is_held[:, None] & (e < E)[None, :]
        v = tl.load(values + start * values_l + i[:, None] * values_l + e[None, :], mask=v_mask, other=0.0)
        # Zero times what a rejected node holds must be zero; a committed value stays what it is.
        is_finite = tl.abs(v.to(tl.float32)) < float("inf")
        v = tl.where(is_finite | (node + i < 0)[:, None], v, 0.0).to(v.dtype)
        top, total, acc = _take_in(s, v, top, total, acc, PRECISION)

    place = (ib * N + t) * H + ih  # [BLOCK_M]
    if SPLITS == 1:
        o = tl.where(is_node[:, None], acc / total[:, None], 0.0)
        stored = is_row[:, None] & (e < E)[None, :]
        tl.store(output + place[:, None] * E + e[None, :], o.to(output.dtype.element_ty), mask=stored)
    else:
        # A part without blocks writes nothing, and the sum over parts does not read it.
        is_written = row < tl.where(first < last, N * GROUPS, 0)
        place += split.to(tl.int64) * B * N * H
        tl.store(partial + place[:, None] * E + e[None, :], acc, mask=is_written[:, None] & (e < E)[None, :])
        tl.store(tops + place, top, mask=is_written)
        tl.store(totals + place, total, mask=is_written)
