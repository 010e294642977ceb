"""Equal layers become calls of one subgraph: which do, what stays outside, and that the numbers are the same bit for bit."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, fx, nn

from tests.layer_stacks import WIDTH, Block, Positions, Stack, run_rewritten
from tests.tiny_models import VOCABULARY, tiny_model
from tests.two_processes import words_of_two_processes
from tests.verified_model import LENGTHS, TOLERANCE, VerifiedModel
from treewy_inductor import backend, compat, passes
from treewy_inductor.backend import treewy
from treewy_inductor.passes import outline_layers

OUTLINED = {"treewy.codegen": False, "treewy.outline": True}


def _run(module: nn.Module, outline: bool = True) -> tuple[Tensor, list[Tensor], int, fx.GraphModule]:
    """Return the output, every buffer afterwards, how many calls were written, and the graph."""
    return run_rewritten(module, outline_layers if outline else lambda graph: 0)


class OutlineLayers(TestCase):
    def _assert_same_numbers(self, module: nn.Module, calls: int) -> fx.GraphModule:
        output, buffers, written, graph = _run(module)
        plain, plain_buffers, *_ = _run(module, outline=False)
        self.assertEqual(written, calls)
        self.assertTrue(torch.equal(output, plain))
        for found, expected in zip(buffers, plain_buffers, strict=True):
            self.assertTrue(torch.equal(found, expected))
            self.assertTrue(found.any())
        return graph

    def test_three_equal_layers_become_calls_of_one_subgraph(self) -> None:
        graph = self._assert_same_numbers(Stack(Block(), Block(), Block()), 3)
        lines = [str(node.target) for node in graph.graph.nodes if node.op in ("get_attr", "call_function")]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
treewy_layer_0
invoke_subgraph
<built-in function getitem>
<built-in function getitem>
treewy_layer_0
invoke_subgraph
<built-in function getitem>
<built-in function getitem>
treewy_layer_0
invoke_subgraph
<built-in function getitem>
<built-in function getitem>
aten.tanh.default
aten.copy_.default
aten.copy_.default
aten.copy_.default""",
        )

    def test_layer_of_another_width_stays(self) -> None:
        self._assert_same_numbers(Stack(Block(), Block(3 * WIDTH), Block()), 2)

    def test_layers_without_an_equal_stay(self) -> None:
        self._assert_same_numbers(Stack(Block(), Block(3 * WIDTH)), 0)

    def test_layer_with_another_constant_stays(self) -> None:
        module = Stack(Block(), Block(), Block())
        module.layers[1].forward = lambda x: Block.forward(module.layers[1], x) * 2  # type: ignore[method-assign]
        self._assert_same_numbers(module, 2)

    def test_random_numbers_stay_outside(self) -> None:
        *_, graph = _run(Stack(Block(drop=0.5), Block(drop=0.5)))
        for name, inner in graph.named_children():
            assert isinstance(inner, fx.GraphModule), name
            targets = [node.target for node in inner.graph.nodes if node.op == "call_function"]
            self.assertFalse(any(torch.Tag.nondeterministic_seeded in target.tags for target in targets))

    def test_update_in_place_that_is_read_again_stays_between_two_calls(self) -> None:
        graph = self._assert_same_numbers(Stack(Positions(), Positions()), 4)
        self.assertEqual(len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)), 6)

    def test_no_result_shares_memory_with_an_operand_or_a_result(self) -> None:
        *_, graph = _run(Stack(Positions(), Positions()))
        for call in graph.graph.find_nodes(op="call_function", target=compat.INVOKE_SUBGRAPH):
            tensors = [*(node.meta["val"] for node in call.args[2:]), *call.meta["val"]]
            storages = [tensor.untyped_storage()._cdata for tensor in tensors]
            self.assertEqual(len(set(storages)), len(storages))

    def test_nodes_keep_their_lines_and_modules(self) -> None:
        *_, graph = _run(Stack(Block(), Block()))
        for name, inner in graph.named_children():
            assert isinstance(inner, fx.GraphModule), name
            for node in inner.graph.nodes:
                if node.op == "call_function":
                    self.assertIn("layer_stacks.py", node.meta["stack_trace"])
                    self.assertTrue(node.meta["nn_module_stack"])


def _drawn_trees(nodes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    parents = torch.tensor(
        [[-1, *(int(torch.randint(0, t, (), generator=generator)) for t in range(1, nodes))] for _ in LENGTHS]
    )
    return parents.int(), torch.randint(0, VOCABULARY, (len(LENGTHS), nodes), generator=generator)


def test_outlined_model_equals_paths_run_alone_after_commits_and_never_recompiles() -> None:
    """Eight layers of Qwen3.5: three calls of one linear layer, of half a softmax layer, and of the other half, twice."""
    calls: list[int] = []
    write = compat.add_subgraph

    def counted(*args: Any) -> str:
        calls.append(1)
        return write(*args)

    nodes, generator = 13, torch.Generator().manual_seed(3)
    # Twice the layers of the other tests, so weights that add up less rounding.
    model = tiny_model(num_hidden_layers=8, initializer_range=0.05)
    verified = VerifiedModel(model, nodes)
    compiled: list[int] = []

    def counting(*args: Any, **options: Any) -> Callable[..., Any]:
        compiled.append(1)
        return treewy(*args, **options)

    verified.step = torch.compile(model, backend=counting, fullgraph=True, dynamic=False, options=OUTLINED)
    compat.add_subgraph = counted
    try:
        for last in ([4, 7, None], [0, 12, 3], [None, 2, 9]):
            parents, tokens = _drawn_trees(nodes, generator)
            found = verified.verify(parents, tokens)
            assert float(verified.errors(found, parents, tokens).max()) < TOLERANCE
            verified.commit(parents, tokens, last)
    finally:
        compat.add_subgraph = write
    assert len(calls) == 3
    assert len(compiled) == 1
    verified.assert_rows_equal_recomputing()


GENERATED = textwrap.dedent(
    """
    import torch
    from torch._dynamo.utils import counters
    from tests.layer_stacks import INPUT, Block, Stack
    from tests.test_backend import Seen
    from treewy_inductor.backend import treewy, TreePass
    from treewy_inductor.passes import outline_layers

    class Outline(Seen):
        def __call__(self, graph):
            self.markers.append(outline_layers(graph))

    torch.manual_seed(0)
    module, outline = Stack(Block(), Block(), Block()), Outline()
    with torch.no_grad():
        found = torch.compile(module, backend=treewy, options={"joint_custom_pre_pass": outline})(INPUT)
        kept = [buffer.clone() for buffer in module.buffers()]
        expected = module(INPUT)
    for one, other in zip([found, *kept], [expected, *module.buffers()]):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    print(max(outline.markers, default=0), counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
    """
)


def test_generated_code_of_a_subgraph_is_right_and_served_from_the_cache_in_a_second_process(tmp_path: Any) -> None:
    (calls, hits), (warm_calls, warm_hits) = (map(int, words) for words in words_of_two_processes(GENERATED, tmp_path))
    assert (calls, hits) == (3, 0)
    assert warm_calls == 0 and warm_hits > 0


@pytest.mark.parametrize(
    "options, decided",
    [
        ({}, None),
        ({"treewy.outline": False}, False),
        ({"treewy.outline": True}, True),
        ({"treewy.codegen": False}, False),
        ({"treewy.codegen": False, "treewy.outline": True}, True),
        ({"cpp_wrapper": True}, False),
    ],
)
def test_left_to_the_device_unless_told_or_python_calls_no_kernels(
    options: dict[str, Any], decided: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[dict[str, Any]] = []
    monkeypatch.setattr(compat, "compile_with_inductor", lambda module, inputs, inductor, *_: passed.append(inductor))
    treewy(fx.GraphModule(nn.Module(), fx.Graph()), [], options=options)
    assert passed[0]["joint_custom_pre_pass"].own["outline"] is decided


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("asked", [None, True, False])
def test_unset_on_a_cpu_alone(on_cpu: bool, asked: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[fx.Graph] = []
    monkeypatch.setattr(passes, "outline_layers", lambda graph: calls.append(graph) or 0)
    monkeypatch.setattr(backend, "_is_on_cpu", lambda graph: on_cpu)
    monkeypatch.setattr(backend, "_is_marker", lambda node: True)
    monkeypatch.setattr(backend, "_rewrite", lambda graph, check: None)
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    backend.TreePass(backend.OWN_OPTIONS | {"outline": asked}, None)(graph)
    assert len(calls) == (on_cpu if asked is None else asked)
