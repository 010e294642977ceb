"""Recurrences that nobody named: each is proven, and on a tree computes what its own loop computes along every path."""

from __future__ import annotations

import unittest

import pytest
import torch
from torch import Tensor

from tests.recurrence_closed_forms import CLOSED_FORMS, HalfPrecisionInputs
from tests.recurrence_loops import LOOPS
from tests.recurrences import WIDTH, ChainSlot, Recurrence, TreeSlot
from treewy_inductor import ops, records
from treewy_inductor.backend import treewy
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.tree import DraftTree

VARIANTS = LOOPS + CLOSED_FORMS
BRANCHED = DraftTree.from_parents([-1, 0, 0, 1, 1, 2, 3])
# Two nodes fewer, so this row ends with inert ones.
FOREST = DraftTree.from_parents([-1, -1, 0, 2, 2])
NODES = len(BRANCHED)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_tree_outputs_and_committed_state_are_those_of_the_users_loop(variant: type[Recurrence]) -> None:
    dtype = torch.bfloat16 if variant is HalfPrecisionInputs else torch.float32
    # Rounding of one path's length in float32; in bf16 the inputs of the last product are rounded as well.
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    layer = variant(dtype)
    torch.manual_seed(1)
    hidden = torch.randn(2, NODES, WIDTH, dtype=dtype)
    state = torch.randn(2, layer.value_heads, layer.key_dim, layer.value_dim)
    slot = TreeSlot(layer, state.clone(), TreeEncoding.of(BRANCHED, FOREST))

    with torch.no_grad(), records.collect() as found:
        torch._dynamo.reset()
        step = torch.compile(layer, backend=treewy, fullgraph=True, dynamic=False, options={"treewy.codegen": False})
        outputs = step(hidden, slot)
    assert [type(record) for record in found] == [records.Proven]

    for row, tree in enumerate((BRANCHED, FOREST)):
        for node in range(len(tree)):
            path = tree.path_to(node)
            expected, expected_state = _alone(layer, hidden[row : row + 1, path], state[row : row + 1])
            _assert_close(outputs[row, node], expected, tolerance, f"output of node {node}, row {row}")
            committed = _commit(slot, state, row, path)
            _assert_close(committed, expected_state, tolerance, f"state of node {node}, row {row}")


def _alone(layer: Recurrence, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run one path as an ordinary sequence with the user's own code."""
    slot = ChainSlot(state)
    with torch.no_grad():
        output = layer(hidden, slot)
    return output[0, -1], slot.state[0]


def _commit(slot: TreeSlot, state: Tensor, row: int, path: list[int]) -> Tensor:
    committed = state[None].clone()
    accepted = torch.full((2, NODES), -1, dtype=torch.int32)
    accepted[row, : len(path)] = torch.tensor(path)
    buffers = (slot.keys, slot.key_scale, slot.pseudo_values, slot.path_decay)
    ops.commit_state(committed, *(buffer[None] for buffer in buffers), accepted)
    return committed[0, row]


def _assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    error = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error < tolerance, f"{what}: relative error {error:.1e}, expected below {tolerance:.0e}"


class CountOfVariants(unittest.TestCase):
    def test_no_variant_is_listed_twice(self) -> None:
        self.assertEqual(len(set(VARIANTS)), len(VARIANTS))
        self.assertGreaterEqual(len(VARIANTS), 15)
