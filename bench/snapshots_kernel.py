"""The baseline: walk the tree node by node and write one full state a node, as serving engines verify drafts.

    S_t = a_t S_p(t) + k_t (beta_t (v_t - a_t S_p(t)^T k_t))^T      o_t = S_t^T q_t      S_t written for every t

One program owns one (batch row, value head) and BLOCK_V value columns; a node whose parent is the node before it finds the
parent's state in registers, any other reads it back. Written here from the recurrence, for comparison only: it writes
4 K V N bytes a head where the tree kernels write 8 V N.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def snapshots_kernel(
    query,  # [B, N, HK, K] float, stride 1 along K
    key,  # [B, N, HK, K] like query
    value,  # [B, N, HV, V] float, stride 1 along V
    log_decay,  # [B, N, HV] float32, contiguous
    beta,  # [B, N, HV] float, contiguous
    state,  # [B, HV, V, K] float32, contiguous
    parents,  # [B, N] int32
    snapshots,  # [B, N, HV, V, K] float32 out
    output,  # [B, N, HV, V] float out
    row,
    head,
    N,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    iv = tl.program_id(0) % (V // BLOCK_V)
    ih = tl.program_id(0) // (V // BLOCK_V) % HV
    ib = (tl.program_id(0) // (V // BLOCK_V * HV)).to(tl.int64)
    ik = ih // (HV // HK)
    c = iv * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, K)
    cell = c[:, None] * K + d[None, :]
    S = tl.load(state + (ib * HV + ih) * K * V + cell)
    for t in range(N):
        parent = tl.load(parents + ib * N + t)
        if parent != t - 1:
            if parent < 0:
                S = tl.load(state + (ib * HV + ih) * K * V + cell)
            else:
                S = tl.load(snapshots + ((ib * N + parent) * HV + ih) * K * V + cell)
        k = tl.load(key + (ib * N + t) * row + ik * K + d).to(tl.float32)
        q = tl.load(query + (ib * N + t) * row + ik * K + d).to(tl.float32)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + EPS)
        q = q * tl.rsqrt(tl.sum(q * q, 0) + EPS) * SCALE
        v = tl.load(value + (ib * N + t) * row + ih * head + c).to(tl.float32)
        b = tl.load(beta + (ib * N + t) * HV + ih).to(tl.float32)
        S = S * tl.exp(tl.load(log_decay + (ib * N + t) * HV + ih))
        u = b * (v - tl.sum(S * k[None, :], 1))
        S = S + u[:, None] * k[None, :]
        tl.store(output + ((ib * N + t) * HV + ih) * V + c, tl.sum(S * q[None, :], 1).to(output.dtype.element_ty))
        tl.store(snapshots + ((ib * N + t) * HV + ih) * K * V + cell, S)


def plan_snapshots(
    arguments: tuple, parents: Tensor, snapshots: Tensor, block_v: int, warps: int
) -> tuple[Callable[[], None], Tensor]:
    """Return a call that verifies the case of ``bench.kernel_cases.arguments`` and the output it fills."""
    query, key, value, log_decay, beta, state = arguments[:6]
    B, N, HK, K = key.shape
    HV, V = value.shape[2:]
    output = torch.empty(B, N, HV, V, device="cuda", dtype=query.dtype)
    stored = state.transpose(2, 3)
    grid = (B * HV * (V // block_v),)

    def call() -> None:
        snapshots_kernel[grid](
            *(query, key, value, log_decay, beta, stored, parents, snapshots, output, query.stride(1), value.stride(2), N),
            *(arguments[11], arguments[10], HK, HV, K, V, block_v),
            num_warps=warps,
        )

    return call, output
