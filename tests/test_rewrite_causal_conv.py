"""Rewriting of convolutions: each form a model writes becomes one op, proven on every column; each refusal says why."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from treewy_inductor import ops, records
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.passes.rewrite_causal_conv import rewrite_causal_conv
from treewy_inductor.tree import DraftTree

rewriting = import_module("treewy_inductor.passes.rewrite_causal_conv")
CHAIN, BRANCHED = DraftTree.from_parents([-1, 0, 1, 2, 3]), DraftTree.from_parents([-1, 0, 0, 1, 3])
C, K, N = 6, 4, 5

Form = Callable[..., Tensor]


def _padded(columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As transformers convolves a prompt: padded on both sides, cut, activated, and then cut to the new tokens."""
    out = F.conv1d(columns, weight, bias, padding=K - 1, groups=C)[:, :, : columns.shape[-1]]
    return F.silu(out)[:, :, -N:]


def _unpadded(columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As transformers convolves one token: no padding, so one column too many."""
    return F.silu(F.conv1d(columns, weight, bias, groups=C)[:, :, -N:])


def _shifted_sum(columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Written out: one shifted product a tap."""
    out = sum(weight[:, :, j] * columns[:, :, 1 + j : 1 + j + N] for j in range(K))
    assert isinstance(out, Tensor)
    return out if bias is None else out + bias[:, None]


def _in_float32(columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Half precision columns are convolved in float32."""
    wide = _padded(columns.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(columns.dtype)


def _args(tree: DraftTree, bias: bool, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, C, N), (1, C, K), (C, 1, K)] + ([(C,)] if bias else [])
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return (*drawn, *([] if bias else [None]), TreeEncoding.of(tree, kernel_size=K).window)


def _graph(form: Form, args: tuple[Any, ...]) -> fx.GraphModule:
    def marked(inputs: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor) -> Tensor:
        return form(ops.conv_in(inputs, history, window, 3, 0), weight, bias) * 2

    with torch.no_grad():
        trace = make_fx(torch.func.functionalize(marked), decomposition_table=select_decomp_table(), tracing_mode="fake")
        module = trace(*args)
    module.graph.eliminate_dead_code()
    return module


def _text(graph: fx.Graph) -> str:
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            name = "getitem" if node.target is operator.getitem else str(node.target)
            value = node.meta["val"]
            dtype = str(value.dtype).removeprefix("torch.")
            lines.append(f"{node.name}: {dtype}{list(value.shape)} = {name}({', '.join(map(str, node.args))})")
    return "\n".join(lines)


@contextmanager
def _refused_for(test: TestCase, form: Form, reason: str, args: tuple[Any, ...] | None = None) -> Iterator[records.Refused]:
    module = _graph(form, args or _args(CHAIN, bias=False))
    before = str(module.graph)
    with records.collect() as found:
        test.assertEqual(rewrite_causal_conv(module.graph), 0)
    test.assertEqual(str(module.graph), before)
    (refusal,) = found
    assert isinstance(refusal, records.Refused)
    test.assertIn(reason, refusal.reason)
    test.assertEqual((refusal.layer, refusal.kind), (3, "causal_conv1d"))
    yield refusal


class RewriteCausalConv(TestCase):
    def test_graph_afterwards(self) -> None:
        module = _graph(_padded, _args(CHAIN, bias=True))
        self.assertEqual(rewrite_causal_conv(module.graph), 1)
        self.assertExpectedInline(
            _text(module.graph),
            """\
reshape_default: float32[6, 4] = aten.reshape.default(weight_1, [6, 4])
tree_causal_conv1d_default: float32[1, 6, 5] = treewy.tree_causal_conv1d.default(inputs_1, history_1, reshape_default, bias_1, window_1)
neg_default: float32[1, 6, 5] = aten.neg.default(tree_causal_conv1d_default)
exp_default: float32[1, 6, 5] = aten.exp.default(neg_default)
add_tensor: float32[1, 6, 5] = aten.add.Tensor(exp_default, 1)
div_tensor: float32[1, 6, 5] = aten.div.Tensor(tree_causal_conv1d_default, add_tensor)
mul: float32[1, 6, 5] = aten.mul.Tensor(div_tensor, 2)""",
        )

    def test_half_precision_convolved_in_float32(self) -> None:
        module = _graph(_in_float32, _args(CHAIN, bias=False, dtype=torch.bfloat16))
        self.assertEqual(rewrite_causal_conv(module.graph), 1)
        self.assertExpectedInline(
            _text(module.graph),
            """\
convert_element_type_default: float32[1, 6, 5] = prims.convert_element_type.default(inputs_1, torch.float32)
convert_element_type_default_1: float32[1, 6, 4] = prims.convert_element_type.default(history_1, torch.float32)
reshape_default: bfloat16[6, 4] = aten.reshape.default(weight_1, [6, 4])
tree_causal_conv1d_default: float32[1, 6, 5] = treewy.tree_causal_conv1d.default(convert_element_type_default, convert_element_type_default_1, reshape_default, None, window_1)
neg_default: float32[1, 6, 5] = aten.neg.default(tree_causal_conv1d_default)
exp_default: float32[1, 6, 5] = aten.exp.default(neg_default)
add_tensor: float32[1, 6, 5] = aten.add.Tensor(exp_default, 1)
div_tensor: float32[1, 6, 5] = aten.div.Tensor(tree_causal_conv1d_default, add_tensor)
convert_element_type_2: bfloat16[1, 6, 5] = prims.convert_element_type.default(div_tensor, torch.bfloat16)
mul: bfloat16[1, 6, 5] = aten.mul.Tensor(convert_element_type_2, 2)""",
        )

    def test_every_form_on_a_chain_computes_what_it_did(self) -> None:
        for form in (_padded, _unpadded, _shifted_sum):
            for bias in (True, False):
                with self.subTest(form=form.__name__, bias=bias):
                    args = _args(CHAIN, bias)
                    module = _graph(form, args)
                    with records.collect() as found:
                        self.assertEqual(rewrite_causal_conv(module.graph), 1)
                    module.recompile()
                    expected = form(torch.cat([args[1], args[0]], -1), args[2], args[3]) * 2
                    torch.testing.assert_close(module(*args), expected, rtol=1e-5, atol=1e-6)
                    (record,) = found
                    assert isinstance(record, records.Proven)
                    self.assertLess(record.error, 1e-9)
                    self.assertGreater(record.runner_up, 1e-3)
                    self.assertEqual("bias" in record.roles, bias and form is not _shifted_sum)

    def test_every_node_of_a_tree_is_its_path_convolved_alone(self) -> None:
        args = _args(BRANCHED, bias=True)
        module = _graph(_padded, args)
        self.assertEqual(rewrite_causal_conv(module.graph), 1)
        module.recompile()
        got = module(*args)
        for node in range(N):
            path = BRANCHED.path_to(node)
            columns = torch.cat([args[1], args[0][:, :, path]], -1)
            alone = F.silu(F.conv1d(columns, args[2], args[3], groups=C)[:, :, -1]) * 2
            torch.testing.assert_close(got[:, :, node], alone, rtol=1e-5, atol=1e-6)

    def test_check_on_a_tree_passes_what_is_right(self) -> None:
        for form, dtype in ((_padded, torch.float32), (_unpadded, torch.bfloat16), (_in_float32, torch.float16)):
            module = _graph(form, _args(CHAIN, bias=True, dtype=dtype))
            with records.collect() as found:
                self.assertEqual(rewrite_causal_conv(module.graph, check=True), 1)
            self.assertIsInstance(found[0], records.Proven)

    def test_check_on_a_tree_catches_what_a_wrong_rewrite_would_do(self) -> None:
        def without_bias(graph: fx.Graph, marker: fx.Node, found: Any, columns: Any) -> Any:
            return write(graph, marker, replace(found, bias=None), columns)

        def without_silu(graph: fx.Graph, marker: fx.Node, found: Any, columns: Any) -> Any:
            op = next(iter(write(graph, marker, found, columns).values()))
            while op.target is not ops.tree_causal_conv1d:
                op = op.all_input_nodes[0]
            return dict.fromkeys(found.ends, op)

        def with_taps_in_reverse(graph: fx.Graph, marker: fx.Node, found: Any, columns: Any) -> Any:
            ends = write(graph, marker, found, columns)
            (op,) = graph.find_nodes(op="call_function", target=ops.tree_causal_conv1d)
            with graph.inserting_before(op):
                flipped = graph.call_function(torch.ops.aten.flip.default, (op.args[2], [1]))
            op.update_arg(2, flipped)
            return ends

        write = rewriting._write
        for wrong in (without_bias, without_silu, with_taps_in_reverse):
            with self.subTest(wrong.__name__), patch.object(rewriting, "_write", wrong):
                module = _graph(_padded, _args(CHAIN, bias=True))
                before = str(module.graph)
                with records.collect() as found:
                    self.assertEqual(rewrite_causal_conv(module.graph, check=True), 0)
                self.assertEqual(str(module.graph), before)
                self.assertIn("on a random tree its output at node", found[0].reason)  # type: ignore[union-attr]

    def test_equal_convolutions_are_proven_once_and_others_on_their_own(self) -> None:
        forms = (_padded, _padded, lambda *args: _padded(*args).tanh(), _padded)

        def marked(inputs: Tensor, history: Tensor, window: Tensor, *weights: Tensor) -> list[Tensor]:
            layers = enumerate(zip(forms, weights, strict=True))
            return [form(ops.conv_in(inputs, history, window, layer, 0), weight, None) for layer, (form, weight) in layers]

        inputs, history, weight, _, window = _args(CHAIN, bias=False)
        args = (inputs, history, window, *(weight * scale for scale in (1, 2, 3, 4)))
        with torch.no_grad():
            trace = make_fx(torch.func.functionalize(marked), decomposition_table=select_decomp_table(), tracing_mode="fake")
            module = trace(*args)
        with records.collect() as found:
            self.assertEqual(rewrite_causal_conv(module.graph), 4)
        proven = [record for record in found if isinstance(record, records.Proven)]
        self.assertEqual([record.proven_by for record in proven], [0, 0, 2, 0])
        self.assertEqual([record.seconds > 0 for record in proven], [True, False, True, False])
        module.recompile()
        columns = torch.cat([history, inputs], -1)
        for got, form, weight in zip(module(*args), forms, args[3:], strict=True):
            torch.testing.assert_close(got, form(columns, weight, None), rtol=1e-5, atol=1e-6)

    def test_taps_in_reverse_are_refused(self) -> None:
        def form(columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return _padded(columns, weight.flip(-1), bias)

        with _refused_for(self, form, "no node is a causal convolution"):
            pass

    def test_column_from_the_future_is_refused(self) -> None:
        def form(columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = F.conv1d(columns, weight, bias, padding=K - 1, groups=C)
            return F.silu(out[:, :, 1 : columns.shape[-1] + 1])[:, :, -N:]

        with _refused_for(self, form, "") as refusal:
            self.assertTrue(refusal.node)

    def test_mixed_channels_are_refused(self) -> None:
        def form(columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return F.conv1d(columns, weight.expand(C, C, K), bias, padding=K - 1)[:, :, K : K + N]

        with _refused_for(self, form, "history and new tokens alike, reach this operator") as refusal:
            self.assertIn("convolution", refusal.op)

    def test_sum_over_columns_is_refused_at_the_sum(self) -> None:
        def form(columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return _padded(columns, weight, bias) + columns.sum(-1, keepdim=True)

        with _refused_for(self, form, "reach this operator") as refusal:
            self.assertIn("sum", refusal.op)

    def test_columns_weighed_by_their_place_are_refused(self) -> None:
        def form(columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return _padded(columns * torch.arange(columns.shape[-1]), weight, bias)

        with _refused_for(self, form, "reach this operator"):
            pass
