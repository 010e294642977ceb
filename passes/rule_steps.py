"""The steps of the gated delta rule for one token, and how each is written by mistake: what a refusal looks for.

decayed    D = a S        prediction  p = D^T k        pseudo-value  u = b (v - p)
written    W = D + k u^T       output  o = W^T q       the next token's S is W

B batch   HV value heads   K key dim   V value dim
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Letter to value: S, D, W [B, HV, K, V]; q, k [B, HV, K]; v, p, r, u, o [B, HV, V]; a [B, HV, K or 1, 1]; b [B, HV, 1].
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """One way to take a step: its value, and what is wrong with it; nothing is wrong with a step's first way."""

    value: Callable[[Values], Tensor]
    fault: str = ""


@dataclass(frozen=True)
class Step:
    """A step of the rule: ``formula`` says it, ``sets`` is the letter it is known by; one that ``may_lack`` is skipped."""

    sets: str
    formula: str
    ways: tuple[Way, ...]
    may_lack: bool = False


def _times(S: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bhkv,bhk->bhv", S, x)


def _outer(k: Tensor, u: Tensor) -> Tensor:
    return torch.einsum("bhk,bhv->bhkv", k, u)


DECAYED = Step(
    "D",
    "the state's decay, a S",
    (Way(lambda x: x["a"] * x["S"]), Way(lambda x: x["S"], "the state is not decayed before the token reads it")),
)
PREDICTION = Step(
    "p",
    "the prediction, S^T k of the decayed state",
    (
        Way(lambda x: _times(x["D"], x["k"])),
        Way(lambda x: _times(x["S"], x["k"]), "the prediction is made from the state before its decay"),
        Way(lambda x: _times(x["D"], x["q"]), "the query makes the prediction, not the key"),
    ),
)
RESIDUAL = Step("r", "v - prediction", (Way(lambda x: x["v"] - x["p"]),), may_lack=True)
PSEUDO_VALUE = Step(
    "u",
    "the pseudo-value, beta (v - prediction)",
    (
        Way(lambda x: x["b"] * (x["v"] - x["p"])),
        Way(lambda x: x["b"] * x["v"] - x["p"], "beta is missing from the prediction in beta (v - prediction)"),
        Way(lambda x: x["v"] - x["b"] * x["p"], "beta is missing from the value in beta (v - prediction)"),
        Way(lambda x: x["b"] * x["b"] * (x["v"] - x["p"]), "beta is applied twice"),
        Way(lambda x: x["b"] * (x["v"] - x["b"] * x["p"]), "beta is applied twice to the prediction"),
        Way(lambda x: x["b"] * (x["v"] + x["p"]), "the prediction is added to the value, not subtracted"),
    ),
)
WRITTEN = Step(
    "W",
    "the write, S + k u^T with that u",
    (
        Way(lambda x: x["D"] + _outer(x["k"], x["u"])),
        Way(lambda x: x["S"] + _outer(x["k"], x["u"]), "the token is written into the state before its decay"),
        Way(lambda x: x["D"] + _outer(x["q"], x["u"]), "the token is written under its query, not its key"),
        Way(lambda x: x["a"] * (x["S"] + _outer(x["k"], x["u"])), "the decay also shrinks what the token has just written"),
    ),
)
OUTPUT = Step(
    "o",
    "the output, S^T q after the write",
    (
        Way(lambda x: _times(x["W"], x["q"])),
        Way(lambda x: _times(x["D"], x["q"]), "the output is read before the token is written"),
        Way(lambda x: _times(x["S"], x["q"]), "the output is read from the state before the token"),
        Way(lambda x: _times(x["a"] * x["W"], x["q"]), "the output is read from a state that was decayed after the write"),
    ),
)
NEXT = Step(
    "S",
    "the state that goes on to the next token",
    (Way(lambda x: x["W"]), Way(lambda x: x["a"] * x["W"], "the decay comes after the token is written")),
)
CORRECTING = (DECAYED, PREDICTION, RESIDUAL, PSEUDO_VALUE, WRITTEN, OUTPUT, NEXT)
# Without a correction a pseudo-value knows no state, so it is given.
WITHOUT_CORRECTION = (DECAYED, WRITTEN, OUTPUT, NEXT)
