"""Copies of outlined layers' results into buffers become calls of one op: which do, which stay, and the same numbers."""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, fx, nn

from tests.layer_stacks import INPUT, ROWS, WIDTH, Block, Positions, Stack, run_rewritten
from treewy_inductor import ops
from treewy_inductor.passes import call_copies, outline_layers

aten = torch.ops.aten


class Halved(Block):
    """A block that keeps its product transposed, in another type."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2 * WIDTH, ROWS, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        product = torch.nn.functional.silu(self.up(x))
        self.kept.copy_(product.T)
        return x + self.down(product)


def _run(module: nn.Module, outline: bool = True, codegen: bool = False) -> tuple[Tensor, list[Tensor], int, fx.GraphModule]:
    """Return the output, every buffer afterwards, how many copies became calls, and the graph."""

    def rewrite(graph: fx.Graph) -> int:
        if outline:
            outline_layers(graph)
        return call_copies(graph)

    return run_rewritten(module, rewrite, codegen)


class CallCopies(TestCase):
    def _assert_same_numbers(self, module: nn.Module, calls: int, codegen: bool = False) -> fx.Graph:
        output, buffers, called, rewritten = _run(module, codegen=codegen)
        graph = rewritten.graph
        self.assertEqual(called, calls)
        self.assertEqual(len(graph.find_nodes(op="call_function", target=ops.store)), calls)
        for buffer in module.buffers():
            buffer.zero_()
        with torch.no_grad():
            expected = module(INPUT)
        for found, exact in zip([output, *buffers], [expected, *module.buffers()], strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
            self.assertTrue(found.any())
        return graph

    def test_copies_of_outlined_results_become_calls(self) -> None:
        graph = self._assert_same_numbers(Stack(Block(), Block(), Block()), 3)
        lines = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        self.assertExpectedInline(
            "\n".join(lines[-4:]),
            """\
aten.tanh.default
treewy.store.default
treewy.store.default
treewy.store.default""",
        )

    def test_views_and_another_type_are_stored_too(self) -> None:
        self._assert_same_numbers(Stack(Halved(), Halved()), 2)

    def test_copy_of_what_is_computed_outside_a_subgraph_stays(self) -> None:
        *_, called, rewritten = _run(Stack(Block(), Block()), outline=False)
        self.assertEqual(called, 0)
        self.assertEqual(len(rewritten.graph.find_nodes(op="call_function", target=aten.copy_.default)), 2)

    def test_update_of_a_part_of_a_buffer_stays(self) -> None:
        graph = self._assert_same_numbers(Stack(Positions(), Positions()), 4)
        self.assertEqual(len(graph.find_nodes(op="call_function", target=aten.copy_.default)), 2)

    def test_generated_code_writes_the_buffers(self) -> None:
        self._assert_same_numbers(Stack(Halved(), Halved()), 2, codegen=True)


def test_a_value_of_another_shape_is_refused() -> None:
    with torch._subclasses.FakeTensorMode(), pytest.raises(RuntimeError, match=r"value \[4, 3\] into buffer \[3, 4\]"):
        ops.store(torch.empty(3, 4), torch.empty(4, 3))
