"""Recurrences that only look like the gated delta rule are refused, at compile time, with a node and a line of the user's."""

from __future__ import annotations

import inspect
import unittest
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.recurrence_near_misses import NEAR_MISSES
from tests.recurrences import WIDTH, Recurrence, TreeSlot
from treewy_inductor import records
from treewy_inductor.backend import treewy
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.errors import UnprovenRecurrence
from treewy_inductor.tree import DraftTree

TREE = DraftTree.from_parents([-1, 0, 0, 1, 1, 2, 3])


def _before_a_norm(near_miss: type[Recurrence]) -> type[Recurrence]:
    """Return the layer with its outputs normalised, as models have it: not linear, and no part of the recurrence."""

    class Normalised(near_miss):  # type: ignore[misc, valid-type]
        def after(self, o: Tensor) -> Tensor:
            return o * (o.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()

    return Normalised


def _refusal_of(near_miss: type[Recurrence]) -> tuple[records.Refused, str]:
    layer = near_miss()
    torch.manual_seed(1)
    hidden = torch.randn(2, len(TREE), WIDTH)
    state = torch.randn(2, layer.value_heads, layer.key_dim, layer.value_dim)
    slot = TreeSlot(layer, state, TreeEncoding.of(TREE, TREE))

    torch._dynamo.reset()
    step = torch.compile(layer, backend=treewy, fullgraph=True, dynamic=False, options={"treewy.codegen": False})
    with torch.no_grad(), records.collect() as found, pytest.raises(Exception) as raised:
        step(hidden, slot)

    assert any(isinstance(error, UnprovenRecurrence) for error in _causes(raised.value)), raised.value
    (refusal,) = found
    assert isinstance(refusal, records.Refused)
    assert refusal.node and refusal.reason
    assert refusal.node in str(raised.value) and refusal.source in str(raised.value)
    return refusal, str(raised.value)


@pytest.mark.parametrize("ends", ["in a projection", "in a norm"])
@pytest.mark.parametrize("near_miss", NEAR_MISSES, ids=lambda near_miss: near_miss.__name__)
def test_refused_with_node_and_source_line(near_miss: type[Recurrence], ends: str) -> None:
    refusal, _ = _refusal_of(_before_a_norm(near_miss) if ends == "in a norm" else near_miss)
    places = [refusal.source, *(":".join(caller.split(":")[:2]) for caller in refusal.callers)]
    # The line itself, or the line that calls the function that it is in.
    assert any(_is_written_by(near_miss, *place.rsplit(":", 1)) for place in places), f"{places}: not in {near_miss.__name__}"


# What is wrong, and the line that it is wrong in.
TOLD = {
    "DecayAfterWrite": ("the decay also shrinks what the token has just written", "(v - predict(S, k)))) * a[..., None]"),
    "PredictionWithoutDecay": ("The prediction is made from the state before its decay", "predict(S, k)"),
    "GateOnValue": ("the state depends on sigmoid_1 beside its tokens", "* self.gate.sigmoid()"),
    "RankTwoUpdate": ("nothing computes the state's decay", "S = S + outer(q, b * (v - predict(S, q)))"),
    "NormalisedState": ("this pow of it is not", "S.square()"),
    "BetaSquared": ("Beta is applied twice to the prediction", "b * v - b * b * predict(S, k)"),
    "PredictionByQuery": ("The query makes the prediction", "predict(S, q)"),
    "ReadBeforeWrite": ("The output is read before the token is written", "o = predict(S, q)"),
    "BiasedState": ("the state depends on", "+ self.bias"),
    "SymmetricUpdate": ("nothing computes the write", "outer(k, u)"),
    "SquashedPseudoValue": ("this tanh of it is not", "torch.tanh("),
    "MixedHeads": ("nothing computes the output", "0.1 * S.flip(1)"),
    "SignOfCorrection": ("The prediction is added to the value", "v + predict(S, k)"),
    "DecayOfPreviousToken": ("the decay comes after the token is written", "S * log_a[:, t]"),
    "ShiftedKeys": ("the prediction", "predict(S, k[:, t])"),
}


@pytest.mark.parametrize("near_miss", [each for each in NEAR_MISSES if each.__name__ in TOLD], ids=lambda each: each.__name__)
def test_the_refusal_says_what_is_wrong_in_which_line(near_miss: type[Recurrence]) -> None:
    refusal, message = _refusal_of(_before_a_norm(near_miss))
    reason, code = TOLD[near_miss.__name__]
    assert reason in refusal.reason and reason in message
    assert any(code in line for line in (refusal.code, *refusal.callers[:1])), f"{refusal}"
    assert all(f"called at {caller}" in message for caller in refusal.callers)


def _causes(error: BaseException | None) -> list[BaseException]:
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or getattr(error, "inner_exception", None)
    return chain


def _is_written_by(near_miss: type[Recurrence], file: str, line: str) -> bool:
    """Whether a line is in the class, or in the loop that it shares with others."""
    for cls in near_miss.__mro__:
        if cls is Recurrence:
            return False
        lines, first = inspect.getsourcelines(cls)
        if Path(file).resolve() == Path(inspect.getfile(cls)).resolve() and first <= int(line) < first + len(lines):
            return True
    return False


class CountOfNearMisses(unittest.TestCase):
    def test_no_near_miss_is_listed_twice(self) -> None:
        self.assertEqual(len(set(NEAR_MISSES)), len(NEAR_MISSES))
        self.assertGreaterEqual(len(NEAR_MISSES), 15)
