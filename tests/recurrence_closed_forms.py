"""The gated delta rule over all tokens at once, with grouped heads, in bf16 and as a scan.

    B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim   C tokens of a chunk

With ``g`` the running sum of log decays, ``G[t, i] = b_t exp(g_t - g_i) (k_t . k_i)`` below the diagonal, and
``R_t = b_t (v_t - exp(g_t) S^T k_t)``, the pseudo-values solve ``(I + G) u = R``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan

from tests.recurrences import Recurrence, log_decay_of, unit

RecurrenceResult = tuple[Tensor, Tensor]


class SolveOverTokens(Recurrence):
    """One triangular solve over the whole sequence."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, v, log_a, beta = _heads_first(unit(q), unit(k), v, log_decay_of(a), b.sigmoid())
        return _finish(*_system(q, k, v, log_a, beta, S, _solve_triangular), q, k, S)


class InverseOverTokens(Recurrence):
    """``(I + G)`` is inverted by a general inverse."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, v, log_a, beta = _heads_first(unit(q), unit(k), v, log_decay_of(a), b.sigmoid())
        return _finish(*_system(q, k, v, log_a, beta, S, _inverse), q, k, S)


class NeumannProduct(Recurrence):
    """``(I + G)^-1 = (I - G)(I + G^2)(I + G^4)...``, exact since ``G`` is nilpotent."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, v, log_a, beta = _heads_first(unit(q), unit(k), v, log_decay_of(a), b.sigmoid())
        return _finish(*_system(q, k, v, log_a, beta, S, _neumann), q, k, S)


class RowByRow(Recurrence):
    """The inverse grows row by row by forward substitution, written into itself."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, v, log_a, beta = _heads_first(unit(q), unit(k), v, log_decay_of(a), b.sigmoid())
        return _finish(*_system(q, k, v, log_a, beta, S, _substitute), q, k, S)


class ChunksOfFour(Recurrence):
    """Chunks of four tokens, the last padded; masks multiply instead of filling."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, v, log_a, beta = _heads_first(unit(q), unit(k), v, log_decay_of(a), b.sigmoid())
        N, C = k.shape[2], 4
        pad = -N % C
        q, k, v = (nn.functional.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        log_a, beta = (nn.functional.pad(x, (0, pad)) for x in (log_a, beta))
        outputs = []
        for start in range(0, N + pad, C):
            q_c, k_c, v_c = (x[:, :, start : start + C] for x in (q, k, v))
            g = log_a[:, :, start : start + C].cumsum(-1)
            b_c = beta[:, :, start : start + C, None]
            lower = torch.ones(C, C, dtype=k.dtype).tril()
            D = ((g[..., :, None] - g[..., None, :]) * lower).exp() * lower
            G = (b_c * (k_c @ k_c.mT) * D) * (lower - torch.eye(C, dtype=k.dtype))
            T = torch.linalg.solve_triangular(G, torch.eye(C, dtype=k.dtype).expand_as(G), upper=False, unitriangular=True)
            u = T @ (b_c * v_c) - (T @ (b_c * g.exp()[..., None] * k_c)) @ S
            outputs.append((q_c * g.exp()[..., None]) @ S + ((q_c @ k_c.mT) * D) @ u)
            S = S * g[..., -1].exp()[..., None, None] + (k_c * (g[..., -1:] - g).exp()[..., None]).mT @ u
        return torch.cat(outputs, 2)[:, :, :N].transpose(1, 2), S


class RepeatedHeads(Recurrence):
    """Two value heads share a key head, repeated by ``repeat_interleave``."""

    value_heads = 4

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k = (unit(x).repeat_interleave(2, 2) for x in (q, k))
        q, k, v, log_a, beta = _heads_first(q, k, v, log_decay_of(a), b.sigmoid())
        return _finish(*_system(q, k, v, log_a, beta, S, _solve_triangular), q, k, S)


class ExpandedHeads(Recurrence):
    """Three value heads share a key head, repeated by ``expand``, the norm taken after it."""

    value_heads = 6

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k = (unit(x[:, :, :, None].expand(-1, -1, -1, 3, -1).flatten(2, 3)) for x in (q, k))
        decay, beta = log_decay_of(a).exp(), b.sigmoid()
        outputs = []
        for t in range(k.shape[1]):
            S = S * decay[:, t, :, None, None]
            u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
            outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        return torch.stack(outputs, 1), S


class GroupedEinsum(Recurrence):
    """Groups stay a dimension of their own: no key is ever repeated."""

    value_heads = 4

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, decay, beta = unit(q), unit(k), log_decay_of(a).exp(), b.sigmoid()
        v, decay, beta = (x.unflatten(2, (2, 2)) for x in (v, decay, beta))
        S = S.unflatten(1, (2, 2))
        outputs = []
        for t in range(k.shape[1]):
            S = S * decay[:, t, :, :, None, None]
            u = beta[:, t, ..., None] * (v[:, t] - torch.einsum("bhgkv,bhk->bhgv", S, k[:, t]))
            S = S + torch.einsum("bhk,bhgv->bhgkv", k[:, t], u)
            outputs.append(torch.einsum("bhgkv,bhk->bhgv", S, q[:, t]))
        return torch.stack(outputs, 1).flatten(2, 3), S.flatten(1, 2)


class AssociativeScan(Recurrence):
    """Transitions are composed by ``associative_scan``: a state for each token, none of them in a loop."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, decay, beta = unit(q), unit(k), log_decay_of(a).exp(), b.sigmoid()
        identity = torch.eye(self.key_dim, dtype=k.dtype)
        correct = identity - beta[..., None, None] * torch.einsum("bnhi,bnhj->bnhij", k, k)
        step = decay[..., None, None] * correct
        write = torch.einsum("bnhk,bnhv->bnhkv", k, beta[..., None] * v)

        def compose(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return right[0] @ left[0], right[0] @ left[1] + right[1]

        steps, writes = associative_scan(compose, (step, write), dim=1, combine_mode="generic")
        states = steps @ S[:, None] + writes
        return torch.einsum("bnhkv,bnhk->bnhv", states, q), states[:, -1]


class ScanOverTokens(Recurrence):
    """The loop is one ``scan`` node whose body is a graph of its own."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        def step(S: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            q_t, k_t, v_t, a_t, b_t = token
            S = S * a_t[..., None, None]
            u = b_t[..., None] * (v_t - (S * k_t[..., None]).sum(-2))
            S = S + k_t[..., None] * u[..., None, :]
            return S, (S * q_t[..., None]).sum(-2)

        tokens = (unit(q), unit(k), v, log_decay_of(a).exp(), b.sigmoid())
        S, o = scan(step, S, tuple(x.transpose(0, 1) for x in tokens))
        return o.transpose(0, 1), S


class HalfPrecisionInputs(Recurrence):
    """Inputs are bf16; the recurrence and its state are float32."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        dtype = v.dtype
        q, k, v, log_a, beta = (x.float() for x in (unit(q), unit(k), v, log_decay_of(a.float()), b.sigmoid()))
        q, k, v, log_a, beta = _heads_first(q, k, v, log_a, beta)
        o, S = _finish(*_system(q, k, v, log_a, beta, S, _solve_triangular), q, k, S)
        return o.to(dtype), S


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _system(q, k, v, log_a, beta, S, solve) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """Return the running log decay, the decays between tokens, and the pseudo-values."""
    g = log_a.cumsum(-1)
    later = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    D = (g[..., :, None] - g[..., None, :]).masked_fill(later, -torch.inf).exp()
    G = (beta[..., None] * (k @ k.mT) * D).tril(-1)
    R = beta[..., None] * (v - g.exp()[..., None] * (k @ S))
    return g, D, solve(G, R)


def _finish(g: Tensor, D: Tensor, u: Tensor, q: Tensor, k: Tensor, S: Tensor) -> RecurrenceResult:
    o = g.exp()[..., None] * (q @ S) + ((q @ k.mT) * D) @ u
    last = g[..., -1:]
    S = last.exp()[..., None] * S + (k * (last - g).exp()[..., None]).mT @ u
    return o.transpose(1, 2), S


def _solve_triangular(G: Tensor, R: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(G, R, upper=False, unitriangular=True)


def _inverse(G: Tensor, R: Tensor) -> Tensor:
    return torch.linalg.inv(torch.eye(G.shape[-1], dtype=G.dtype) + G) @ R


def _neumann(G: Tensor, R: Tensor) -> Tensor:
    identity = torch.eye(G.shape[-1], dtype=G.dtype)
    product, power = identity - G, G @ G
    for _ in range((G.shape[-1] - 1).bit_length() - 1):
        product, power = product @ (identity + power), power @ power
    return product @ R


def _substitute(G: Tensor, R: Tensor) -> Tensor:
    T = -G
    for i in range(1, G.shape[-1]):
        row = T[..., i, :i].clone()
        T[..., i, :i] = row + (row[..., None] * T[..., :i, :i]).sum(-2)
    return (T + torch.eye(G.shape[-1], dtype=G.dtype)) @ R


CLOSED_FORMS = (
    SolveOverTokens,
    InverseOverTokens,
    NeumannProduct,
    RowByRow,
    ChunksOfFour,
    RepeatedHeads,
    ExpandedHeads,
    GroupedEinsum,
    AssociativeScan,
    ScanOverTokens,
    HalfPrecisionInputs,
)
