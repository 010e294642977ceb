"""The gated delta rule on a chain, token by token: what a region is proven to be.

S_t = a_t (I - b_t k_t k_t^T) S_t-1 + b_t k_t v_t^T        o_t = S_t^T q_t

X independent chains   T tokens   K key dim   V value dim
"""

from __future__ import annotations

import torch
from torch import Tensor


def literal_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, corrects: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the rule.

    Args:
        q, k: ``[X, T, K]``, scaled and normalised as they are to be.
        v: ``[X, T, V]``.
        decay: ``[X, T, K]`` or ``[X, T, 1]``, exponentiated.
        beta: ``[X, T]``.
        state: ``[X, K, V]`` before the first token.
        corrects: ``[X]``, 1 for the gated delta rule, 0 for linear attention with a decay, which predicts nothing.

    Returns:
        Outputs ``[X, T, V]`` and the state after the last token.
    """
    S = state.clone()
    outputs = []
    for t in range(k.shape[1]):
        S *= decay[:, t, :, None]
        u = beta[:, t, None] * (v[:, t] - corrects[:, None] * torch.bmm(k[:, t, None], S)[:, 0])
        S = torch.baddbmm(S, k[:, t, :, None], u[:, None])
        outputs.append(torch.bmm(q[:, t, None], S)[:, 0])
    return torch.stack(outputs, 1), S


def normalized(x: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(|x|^2 + eps)`` along the last axis, x itself if eps is negative."""
    return x if eps < 0 else x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()
