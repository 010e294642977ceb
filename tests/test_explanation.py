"""``treewy.explain`` says what was found, runs nothing, and what it names can be found in the user's model."""

from __future__ import annotations

import inspect
import json
import unittest

import torch

import treewy_inductor as treewy
from tests.recurrence_closed_forms import RepeatedHeads
from tests.recurrence_loops import DecayItself
from tests.recurrence_near_misses import SquashedPseudoValue
from tests.recurrences import WIDTH, ChainSlot, Recurrence, TreeSlot
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.findings import Explanation
from treewy_inductor.tree import DraftTree

TREE = DraftTree.from_parents([-1, 0, 0, 1, 1])


def _explained(layer: torch.nn.Module, slot: object) -> Explanation:
    torch.manual_seed(0)
    return treewy.explain(layer, torch.randn(1, len(TREE), WIDTH), slot)


def _slot(layer: Recurrence, number: int = 0) -> TreeSlot:
    state = torch.randn(1, layer.value_heads, layer.key_dim, layer.value_dim)
    return TreeSlot(layer, state, TreeEncoding.of(TREE), number)


class TwoLayers(torch.nn.Module):
    def __init__(self, *layers: Recurrence) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, hidden: torch.Tensor, slots: list[TreeSlot]) -> torch.Tensor:
        for layer, slot in zip(self.layers, slots, strict=True):
            hidden = hidden + layer(hidden, slot)
        return hidden


class ProvenRecurrence(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.layer = RepeatedHeads()
        cls.slot = _slot(cls.layer)
        cls.explanation = _explained(cls.layer, cls.slot)
        (cls.found,) = cls.explanation.recurrences

    def test_nothing_was_run(self) -> None:
        self.assertEqual(self.slot.pseudo_values.abs().sum().item(), 0)

    def test_source_is_the_line_that_computes_the_last_state(self) -> None:
        file, line = self.found.source.rsplit(":", 1)
        self.assertEqual(file, inspect.getfile(RepeatedHeads))
        with open(file, encoding="utf-8") as source:
            self.assertEqual(source.read().splitlines()[int(line) - 1].strip(), self.found.code)
        self.assertIn("S = ", self.found.code)

    def test_roles_are_nodes_of_the_graph_before(self) -> None:
        self.assertEqual(list(self.found.roles), ["query", "key", "value", "log_decay", "beta", "output"])
        names = {node.name: node for node in self.found.before}
        for role, described in self.found.roles.items():
            name, shape = described.split(" ", 1)
            self.assertEqual((names[name].role, names[name].shape), (role, shape))

    def test_errors_lie_far_on_both_sides_of_the_bars(self) -> None:
        self.assertLess(self.found.error, 1e-12)
        self.assertGreater(self.found.runner_up, self.explanation.margin)
        self.assertLess(self.found.error, self.explanation.accept)

    def test_graph_after_is_the_op_and_what_it_reads(self) -> None:
        ops = [node.op for node in self.found.after if node.inputs]
        self.assertEqual(ops[0], "treewy.tree_gated_delta.default")
        self.assertEqual(ops[1:], [f"getitem[{i}]" for i in range(4)])
        self.assertLess(self.explanation.nodes_after, self.explanation.nodes_before)

    def test_seconds_of_the_proof_are_in_those_of_the_rewriting_and_these_in_all(self) -> None:
        times = self.found.proof_seconds, self.explanation.rewrite_seconds, self.explanation.compile_seconds
        self.assertEqual(list(times), sorted(times))
        self.assertGreater(times[0], 0)

    def test_bytes_are_those_of_the_buffers(self) -> None:
        slot, nodes = self.slot, len(TREE)
        buffers = (slot.keys, slot.key_scale, slot.pseudo_values, slot.path_decay)
        self.assertEqual(self.found.bytes_kept, sum(buffer.nbytes for buffer in buffers) // nodes)
        self.assertEqual(self.found.bytes_of_state, slot.state.nbytes)

    def test_dict_is_json_and_text_names_the_rule(self) -> None:
        self.assertEqual(json.loads(json.dumps(self.explanation.to_dict()))["graphs"], 1)
        self.assertIn("2 key heads for 4, l2 norm with 1e-06", self.explanation.text())


class OtherModels(unittest.TestCase):
    def test_one_proven_and_one_refused_layer_are_both_told(self) -> None:
        model = TwoLayers(DecayItself(), SquashedPseudoValue())
        slots = [_slot(layer, number) for number, layer in enumerate(model.layers)]
        explanation = _explained(model, slots)
        (found,), (refused,) = explanation.recurrences, explanation.refusals
        self.assertEqual((found.layer, found.module), (0, "layers.0"))
        self.assertEqual((refused.layer, refused.module), (1, "layers.1"))
        self.assertIn("tanh", refused.code)
        self.assertIn("refused at layer 1", explanation.verdict())

    def test_equal_layers_are_proven_once(self) -> None:
        model = TwoLayers(DecayItself(), DecayItself())
        explanation = _explained(model, [_slot(layer, number) for number, layer in enumerate(model.layers)])
        self.assertEqual([found.proven_by for found in explanation.recurrences], [0, 0])
        self.assertIn("2 recurrences proven with 1 proof", explanation.verdict())

    def test_a_model_without_a_tree_has_nothing_to_prove(self) -> None:
        layer = DecayItself()
        explanation = _explained(layer, ChainSlot(torch.zeros(1, 2, 4, 6)))
        self.assertFalse(explanation.recurrences or explanation.refusals)
        self.assertIn("No recurrence was found", explanation.verdict())

    def test_what_was_compiled_before_is_not_compiled_again(self) -> None:
        compiles = []

        def counting(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
            compiles.append(module)
            return module.forward

        layer, hidden = DecayItself(), torch.randn(1, len(TREE), WIDTH)
        step = torch.compile(layer, backend=counting, fullgraph=True, dynamic=False)
        step(hidden, ChainSlot(torch.zeros(1, 2, 4, 6)))
        _explained(layer, _slot(layer))
        step(hidden, ChainSlot(torch.zeros(1, 2, 4, 6)))
        self.assertEqual(len(compiles), 1)
