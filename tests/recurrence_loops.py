"""The gated delta rule written token by token, each in a way a user might.

    B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim

Every class computes ``S_t = a_t (I - b_t k_t k_t^T) S_t-1 + b_t k_t v_t^T`` and ``o_t = S_t^T q_t``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.recurrences import Recurrence, log_decay_of, unit

RecurrenceResult = tuple[Tensor, Tensor]


class LoopOverTokens(Recurrence):
    """The loop as the papers write it, outputs stacked."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, decay, beta = unit(q), unit(k), log_decay_of(a).exp(), b.sigmoid()
        outputs = []
        for t in range(k.shape[1]):
            S = S * decay[:, t, :, None, None]
            predicted = (S * k[:, t, :, :, None]).sum(-2)
            u = (v[:, t] - predicted) * beta[:, t, :, None]
            S = S + k[:, t, :, :, None] * u[:, :, None, :]
            outputs.append((S * q[:, t, :, :, None]).sum(-2))
        return torch.stack(outputs, 1), S


class ValueByKeyState(Recurrence):
    """The state is kept as [V, K] inside the loop."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, decay, beta = unit(q) * self.key_dim**-0.5, unit(k), log_decay_of(a).exp(), b.sigmoid()
        M = S.transpose(-1, -2)
        outputs = []
        for t in range(k.shape[1]):
            M = decay[:, t, :, None, None] * M
            error = v[:, t] - torch.matmul(M, k[:, t, :, :, None]).squeeze(-1)
            M = M + (beta[:, t, :, None] * error)[..., None] @ k[:, t, :, None, :]
            outputs.append(torch.matmul(M, q[:, t, :, :, None]).squeeze(-1))
        return torch.stack(outputs, 1), M.transpose(-1, -2)


class EinsumLoop(Recurrence):
    """Every product is an einsum, and the outputs fill a preallocated tensor."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, decay, beta = unit(q), unit(k), log_decay_of(a).exp(), b.sigmoid()
        o = torch.zeros_like(v)
        for t in range(k.shape[1]):
            S = torch.einsum("bhkv,bh->bhkv", S, decay[:, t])
            u = torch.einsum("bhv,bh->bhv", v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]), beta[:, t])
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
            o[:, t] = torch.einsum("bhkv,bhk->bhv", S, q[:, t])
        return o, S


class TransitionMatrix(Recurrence):
    """``a (I - b k k^T)`` is formed as a matrix and multiplied with the state."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, beta = unit(q), unit(k), b.sigmoid()
        outer = torch.einsum("bnhi,bnhj->bnhij", k, k)
        identity = torch.eye(self.key_dim, dtype=k.dtype, device=k.device)
        step = log_decay_of(a).exp()[..., None, None] * (identity - beta[..., None, None] * outer)
        write = torch.einsum("bnhk,bnhv->bnhkv", k, beta[..., None] * v)
        outputs = []
        for t in range(k.shape[1]):
            S = step[:, t] @ S + write[:, t]
            outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        return torch.stack(outputs, 1), S


class DecayItself(Recurrence):
    """The decay is a sigmoid: its logarithm is nowhere in the graph."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, decay, beta = unit(q), unit(k), torch.sigmoid(a + 1.0), torch.sigmoid(b)
        outputs = []
        for q_t, k_t, v_t, a_t, b_t in zip(*(x.unbind(1) for x in (q, k, v, decay, beta)), strict=True):
            S = a_t[..., None, None] * S
            u = b_t[..., None] * (v_t - (k_t[..., None, :] @ S).squeeze(-2))
            S = S + k_t[..., :, None] * u[..., None, :]
            outputs.append((q_t[..., None, :] @ S).squeeze(-2))
        return torch.stack(outputs, 1), S


class LogSigmoidDecay(Recurrence):
    """Heads come before tokens, and the decay is a log sigmoid divided by 16."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (unit(q), unit(k), v))
        log_decay, beta = nn.functional.logsigmoid(a).transpose(1, 2) / 16, b.sigmoid().transpose(1, 2)
        outputs = []
        for t in range(k.shape[2]):
            S = S * log_decay[:, :, t].exp()[..., None, None]
            u = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, :, t]))
            S = S + k[:, :, t, :, None] * u[:, :, None]
            outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, :, t]))
        return torch.stack(outputs, 2).transpose(1, 2), S


class SoftplusDecay(Recurrence):
    """The decay is Mamba's ``-exp(A) softplus(a + bias)``, and beta reaches 2."""

    def extra_parameters(self) -> None:
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.bias = nn.Parameter(torch.empty(self.value_heads))

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        log_decay = -self.A_log.float().exp() * nn.functional.softplus(a.float() + self.bias)
        q, k, decay, beta = unit(q), unit(k), log_decay.exp(), 2 * b.sigmoid()
        outputs = []
        for t in range(k.shape[1]):
            S = S * decay[:, t, :, None, None]
            u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
            outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        return torch.stack(outputs, 1), S


class BetaFoldedIn(Recurrence):
    """Key and value are multiplied by beta before the loop, which never sees beta."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, decay, beta = unit(q), unit(k), log_decay_of(a).exp(), b.sigmoid()[..., None]
        k_beta, v_beta = k * beta, v * beta
        outputs = []
        for t in range(k.shape[1]):
            S = S * decay[:, t, :, None, None]
            u = v_beta[:, t] - torch.einsum("bhkv,bhk->bhv", S, k_beta[:, t])
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
            outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        return torch.stack(outputs, 1), S


class OutputFromOldState(Recurrence):
    """The output is the old state's answer plus the token's own share, so the new state is not read."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, decay, beta = unit(q), unit(k), log_decay_of(a).exp(), b.sigmoid()
        own = (q * k).sum(-1, keepdim=True)
        outputs = []
        for t in range(k.shape[1]):
            S = S * decay[:, t, :, None, None]
            u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
            outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) + own[:, t] * u)
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        return torch.stack(outputs, 1), S


class ScaledKey(Recurrence):
    """The scale is on the key, and the keys have no norm of one."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        k, decay, beta = k * 0.25, log_decay_of(a).exp(), b.sigmoid()
        outputs = []
        for t in range(k.shape[1]):
            S = S * decay[:, t, :, None, None]
            u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
            outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        return torch.stack(outputs, 1), S


class ScaledOutput(Recurrence):
    """The scale is on the output, which a gate and a skip of the value then change; norm by ``F.normalize``."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
        decay, beta = log_decay_of(a).exp(), b.sigmoid()
        outputs = []
        for t in range(k.shape[1]):
            S = S * decay[:, t, :, None, None]
            u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
            outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        o = torch.stack(outputs, 1) * self.key_dim**-0.5
        return o * nn.functional.silu(v) + 0.5 * v, S


class NormInsideLoop(Recurrence):
    """Query and key are normalised and the decay is exponentiated token by token inside the loop."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        log_decay, beta = log_decay_of(a), b.sigmoid()
        outputs = []
        for t in range(k.shape[1]):
            q_t, k_t = unit(q[:, t]), unit(k[:, t])
            S = S * log_decay[:, t].exp()[..., None, None]
            u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k_t))
            S = S + torch.einsum("bhk,bhv->bhkv", k_t, u)
            outputs.append(torch.einsum("bhkv,bhk->bhv", S, q_t))
        return torch.stack(outputs, 1), S


class RootMeanSquare(Recurrence):
    """Query and key are normalised by the root of their mean square, after their one head was repeated for both values'."""

    key_heads = 1

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k = (x.repeat_interleave(2, 2) for x in (q, k))
        q, k = (x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() / self.key_dim**0.5 for x in (q, k))
        decay, beta = log_decay_of(a).exp(), b.sigmoid()
        outputs = []
        for t in range(k.shape[1]):
            S = S * decay[:, t, :, None, None]
            u = (v[:, t] - (S * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
            S = S + k[:, t, :, :, None] * u[:, :, None, :]
            outputs.append((S * q[:, t, :, :, None]).sum(-2))
        return torch.stack(outputs, 1), S


LOOPS = (
    LoopOverTokens,
    ValueByKeyState,
    EinsumLoop,
    TransitionMatrix,
    DecayItself,
    LogSigmoidDecay,
    SoftplusDecay,
    BetaFoldedIn,
    OutputFromOldState,
    ScaledKey,
    ScaledOutput,
    NormInsideLoop,
    RootMeanSquare,
)
