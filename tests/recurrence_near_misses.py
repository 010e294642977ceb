"""Recurrences that look like the gated delta rule and are not: on a tree, the rewritten graph would be wrong.

    B batch   N nodes   H heads   K key dim   V value dim

Each class departs in one place. :data:`STEPWISE` ones share one loop and replace a step of it; :data:`OVER_TOKENS` ones
are wrong about which tokens meet, which a recurrence run on a chain alone does not show.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.recurrences import Recurrence, log_decay_of, unit

RecurrenceResult = tuple[Tensor, Tensor]


def predict(S: Tensor, k: Tensor) -> Tensor:
    """Return ``S^T k``: ``[B, H, K, V]`` and ``[B, H, K]`` to ``[B, H, V]``."""
    return torch.einsum("bhkv,bhk->bhv", S, k)


def outer(k: Tensor, u: Tensor) -> Tensor:
    """Return ``k u^T``: ``[B, H, K]`` and ``[B, H, V]`` to ``[B, H, K, V]``."""
    return torch.einsum("bhk,bhv->bhkv", k, u)


class Stepwise(Recurrence):
    """A loop over tokens whose :meth:`step` a subclass writes."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, decay, beta = unit(q), unit(k), log_decay_of(a).exp()[..., None], b.sigmoid()[..., None]
        outputs = []
        for t in range(k.shape[1]):
            o, S = self.step(q[:, t], k[:, t], v[:, t], decay[:, t], beta[:, t], S)
            outputs.append(o)
        return torch.stack(outputs, 1), S

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        """Take one token: q, k ``[B, H, K]``, v ``[B, H, V]``, a, b ``[B, H, 1]``, S ``[B, H, K, V]``."""
        raise NotImplementedError


class DecayAfterWrite(Stepwise):
    """The decay also shrinks what the token just wrote."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        S = (S + outer(k, b * (v - predict(S, k)))) * a[..., None]
        return predict(S, q), S


class PredictionWithoutDecay(Stepwise):
    """The prediction reads the state before its decay."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        S = S * a[..., None] + outer(k, b * (v - predict(S, k)))
        return predict(S, q), S


class GateOnValue(Stepwise):
    """A gate per channel scales the pseudo-value."""

    def extra_parameters(self) -> None:
        self.gate = nn.Parameter(torch.empty(self.value_dim))

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        S = S * a[..., None]
        S = S + outer(k, b * (v - predict(S, k)) * self.gate.sigmoid())
        return predict(S, q), S


class RankTwoUpdate(Stepwise):
    """Each token writes twice, the second time under its query."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        S = S * a[..., None]
        S = S + outer(k, b * (v - predict(S, k)))
        S = S + outer(q, b * (v - predict(S, q)))
        return predict(S, q), S


class NormalisedState(Stepwise):
    """The state is divided by its norm."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        S = S * a[..., None]
        S = S + outer(k, b * (v - predict(S, k)))
        S = S / (1 + S.square().sum((-1, -2), keepdim=True)).sqrt()
        return predict(S, q), S


class BetaSquared(Stepwise):
    """The correction carries beta twice, the value once."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        S = S * a[..., None]
        S = S + outer(k, b * v - b * b * predict(S, k))
        return predict(S, q), S


class PredictionByQuery(Stepwise):
    """The query predicts what the key overwrites."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        S = S * a[..., None]
        S = S + outer(k, b * (v - predict(S, q)))
        return predict(S, q), S


class ReadBeforeWrite(Stepwise):
    """The output is read before the token is written."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        S = S * a[..., None]
        o = predict(S, q)
        return o, S + outer(k, b * (v - predict(S, k)))


class ClampedState(Stepwise):
    """The state is clamped, at a bound that small numbers never reach."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        S = S * a[..., None]
        S = (S + outer(k, b * (v - predict(S, k)))).clamp(-1000, 1000)
        return predict(S, q), S


class BiasedState(Stepwise):
    """A learned bias enters the state with each token."""

    def extra_parameters(self) -> None:
        self.bias = nn.Parameter(torch.empty(self.key_dim, self.value_dim))

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        S = S * a[..., None]
        S = S + outer(k, b * (v - predict(S, k))) + self.bias
        return predict(S, q), S


class SymmetricUpdate(Stepwise):
    """What is written is made symmetric."""

    value_dim = Stepwise.key_dim

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        S = S * a[..., None]
        u = b * (v - predict(S, k))
        S = S + 0.5 * (outer(k, u) + outer(u, k))
        return predict(S, q), S


class SquashedPseudoValue(Stepwise):
    """The pseudo-value goes through tanh."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        S = S * a[..., None]
        S = S + outer(k, torch.tanh(b * (v - predict(S, k))))
        return predict(S, q), S


class MixedHeads(Stepwise):
    """Each head's state takes a little of the other's."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        S = S * a[..., None]
        S = S + outer(k, b * (v - predict(S, k))) + 0.1 * S.flip(1)
        return predict(S, q), S


class SignOfCorrection(Stepwise):
    """The prediction is added where it should be taken away."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        S = S * a[..., None]
        S = S + outer(k, b * (v + predict(S, k)))
        return predict(S, q), S


class OverTokens(Recurrence):
    """A right loop whose inputs :meth:`mix` a subclass lets meet other tokens."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, v, log_a, beta = self.mix(unit(q), unit(k), v, log_decay_of(a), b.sigmoid())
        outputs = []
        for t in range(k.shape[1]):
            S = S * log_a[:, t].exp()[..., None, None]
            S = S + outer(k[:, t], beta[:, t, :, None] * (v[:, t] - predict(S, k[:, t])))
            outputs.append(predict(S, q[:, t]))
        return torch.stack(outputs, 1), S

    def mix(self, q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        """Change what the loop takes: q, k ``[B, N, H, K]``, v ``[B, N, H, V]``, log_a, beta ``[B, N, H]``."""
        raise NotImplementedError


class DecayOfPreviousToken(OverTokens):
    """A token decays by what the token before it in the sequence says, which on a tree need not be its parent."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        return q, k, v, torch.cat([torch.zeros_like(log_a[:, :1]), log_a[:, :-1]], 1), beta


class ShiftedKeys(OverTokens):
    """A token writes under the key of the token before it."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        return q, nn.functional.pad(k, (0, 0, 0, 0, 1, 0))[:, :-1], v, log_a, beta


class KeysNormalisedOverTokens(OverTokens):
    """Each channel of the key is divided by its norm over the tokens."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        return q, k / k.norm(dim=1, keepdim=True), v, log_a, beta


class DecayByPosition(OverTokens):
    """The decay grows with the token's place in the sequence."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        place = torch.arange(1, k.shape[1] + 1, device=k.device, dtype=k.dtype)
        return q, k, v, log_a * place[:, None], beta


class NonCausal(Recurrence):
    """The output of a token also counts the token after it."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, v, log_a, beta = (x.transpose(1, 2) for x in (unit(q), unit(k), v, log_decay_of(a), b.sigmoid()))
        g = log_a.cumsum(-1)
        between = g[..., :, None] - g[..., None, :]
        G = (beta[..., None] * (k @ k.mT) * between.tril().exp()).tril(-1)
        R = beta[..., None] * (v - g.exp()[..., None] * (k @ S))
        u = torch.linalg.solve_triangular(G, R, upper=False, unitriangular=True)
        o = g.exp()[..., None] * (q @ S) + ((q @ k.mT) * between.tril(1).exp()).tril(1) @ u
        last = g[..., -1:]
        S = last.exp()[..., None] * S + (k * (last - g).exp()[..., None]).mT @ u
        return o.transpose(1, 2), S


class LastTokenForgotten(Recurrence):
    """The state written back lacks the last token."""

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> RecurrenceResult:
        q, k, decay, beta = unit(q), unit(k), log_decay_of(a).exp(), b.sigmoid()
        outputs, before = [], S
        for t in range(k.shape[1]):
            before, S = S, S * decay[:, t, :, None, None]
            S = S + outer(k[:, t], beta[:, t, :, None] * (v[:, t] - predict(S, k[:, t])))
            outputs.append(predict(S, q[:, t]))
        return torch.stack(outputs, 1), before


STEPWISE = (
    DecayAfterWrite,
    PredictionWithoutDecay,
    GateOnValue,
    RankTwoUpdate,
    NormalisedState,
    BetaSquared,
    PredictionByQuery,
    ReadBeforeWrite,
    ClampedState,
    BiasedState,
    SymmetricUpdate,
    SquashedPseudoValue,
    MixedHeads,
    SignOfCorrection,
)
OVER_TOKENS = (
    DecayOfPreviousToken,
    ShiftedKeys,
    KeysNormalisedOverTokens,
    DecayByPosition,
    NonCausal,
    LastTokenForgotten,
)
NEAR_MISSES = STEPWISE + OVER_TOKENS
