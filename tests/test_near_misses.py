"""Recurrences that only look like the gated delta rule are refused, at compile time, with a node and a line of the user's."""

from __future__ import annotations

import inspect
import unittest
from pathlib import Path

import pytest
import torch

from tests.recurrence_near_misses import NEAR_MISSES
from tests.recurrences import WIDTH, Recurrence, TreeSlot
from treewy_inductor import records
from treewy_inductor.backend import treewy
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.errors import UnprovenRecurrence
from treewy_inductor.tree import DraftTree

TREE = DraftTree.from_parents([-1, 0, 0, 1, 1, 2, 3])


@pytest.mark.parametrize("near_miss", NEAR_MISSES, ids=lambda near_miss: near_miss.__name__)
def test_refused_with_node_and_source_line(near_miss: type[Recurrence]) -> None:
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
    file, line = refusal.source.rsplit(":", 1)
    assert _is_written_by(near_miss, file, int(line)), f"{refusal.source} is not in {near_miss.__name__}"
    assert refusal.node in str(raised.value) and refusal.source in str(raised.value)


def _causes(error: BaseException | None) -> list[BaseException]:
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or getattr(error, "inner_exception", None)
    return chain


def _is_written_by(near_miss: type[Recurrence], file: str, line: int) -> bool:
    """Whether a line is in the class, or in the loop that it shares with others."""
    for cls in near_miss.__mro__:
        if cls is Recurrence:
            return False
        lines, first = inspect.getsourcelines(cls)
        if Path(file).resolve() == Path(inspect.getfile(cls)).resolve() and first <= line < first + len(lines):
            return True
    return False


class CountOfNearMisses(unittest.TestCase):
    def test_no_near_miss_is_listed_twice(self) -> None:
        self.assertEqual(len(set(NEAR_MISSES)), len(NEAR_MISSES))
        self.assertGreaterEqual(len(NEAR_MISSES), 15)
