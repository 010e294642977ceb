"""A convolution, its activation and the copy of its inputs become one op; whatever else follows or reads leaves them alone."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import TestCase

from treewy_inductor import ops, ops_combined
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.passes import join_conv_silu
from treewy_inductor.tree import DraftTree

TREE = DraftTree.from_parents([-1, 0, 0, 1, 3])


def _arguments(dtype: torch.dtype, taps: int = 4) -> tuple[Tensor, ...]:
    inputs = torch.randn(1, 5, 6).to(dtype).transpose(1, 2)
    window = TreeEncoding.of(TREE, kernel_size=taps).window
    return inputs, torch.randn(1, 6, taps).to(dtype), torch.randn(6, taps).to(dtype), torch.zeros_like(inputs), window


def _silu(x: Tensor) -> Tensor:
    # As Inductor writes it in the graphs that the pass sees.
    cast = torch.ops.prims.convert_element_type.default
    wide = x if x.dtype == torch.float32 else cast(x, torch.float32)
    ratio = wide / (torch.exp(-wide) + 1)
    return ratio if x.dtype == torch.float32 else cast(ratio, x.dtype)


def _layer(inputs: Tensor, history: Tensor, weight: Tensor, buffer: Tensor, window: Tensor) -> Tensor:
    kept = torch.ops.aten.copy.default(buffer, torch.ops.aten.alias.default(inputs))
    convolved = ops.tree_causal_conv1d(inputs, history, weight, None, window)
    result = _silu(convolved) * 2
    torch.ops.aten.copy_.default(buffer, kept)
    return result


def _graph(function: object, arguments: tuple[Tensor, ...]) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*arguments)  # type: ignore[arg-type]


def _text(graph: fx.Graph) -> str:
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            lines.append(f"{node.name} = {getattr(node.target, '__name__', node.target)}({', '.join(map(str, node.args))})")
    return "\n".join(lines)


class JoinConvSilu(TestCase):
    def test_graph_afterwards(self) -> None:
        module = _graph(_layer, _arguments(torch.bfloat16))
        self.assertEqual(join_conv_silu(module.graph), 1)
        self.assertExpectedInline(
            _text(module.graph),
            """\
tree_conv_silu_default = tree_conv_silu.default(inputs_1, history_1, weight_1, None, window_1, 0, 0, 0)
getitem = getitem(tree_conv_silu_default, 0)
getitem_1 = getitem(tree_conv_silu_default, 1)
mul = mul.Tensor(getitem, 2)
copy_ = copy_.default(buffer_1, getitem_1)""",
        )

    def test_keys_are_kept_as_well(self) -> None:
        def keeping(inputs: Tensor, history: Tensor, weight: Tensor, buffer: Tensor, window: Tensor, keys: Tensor) -> Tensor:
            result = _silu(ops.tree_causal_conv1d(inputs, history, weight, None, window))
            _, key, value = torch.ops.aten.split_with_sizes.default(result.permute(0, 2, 1), [1, 4, 1], -1)
            heads = key.reshape(1, 5, 2, 2)
            torch.ops.aten.copy_.default(buffer, inputs)
            torch.ops.aten.copy_.default(keys, torch.ops.aten.copy.default(keys, heads))
            return heads.sum() + value

        arguments = (*_arguments(torch.float32), torch.zeros(1, 5, 2, 2))
        expected, kept = keeping(*arguments), arguments[-1].clone()
        module = _graph(keeping, arguments)
        self.assertEqual(join_conv_silu(module.graph), 1)
        (op,) = module.graph.find_nodes(op="call_function", target=ops_combined.tree_conv_silu)
        self.assertEqual(op.args[-3:], (1, 2, 2))
        _, copy = module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        self.assertEqual(copy.args[1].args, (op, 2))
        module.recompile()
        arguments[-1].zero_()
        torch.testing.assert_close(module(*arguments), expected)
        torch.testing.assert_close(arguments[-1], kept)

    def test_it_computes_what_it_did(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            inputs, history, weight, buffer, window = arguments = _arguments(dtype)
            expected = _layer(*arguments)
            module = _graph(_layer, arguments)
            self.assertEqual(join_conv_silu(module.graph), 1)
            module.recompile()
            again = torch.zeros_like(buffer)
            # The activation no longer sees the convolution rounded to bfloat16.
            bound = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(module(inputs, history, weight, again, window), expected, rtol=bound, atol=bound)
            torch.testing.assert_close(again, inputs)

    def _stays(self, function: object, taps: int = 4) -> None:
        module = _graph(function, _arguments(torch.bfloat16, taps))
        before = str(module.graph)
        self.assertEqual(join_conv_silu(module.graph), 0)
        self.assertEqual(str(module.graph), before)

    def test_another_activation_stays(self) -> None:
        def gelu(inputs: Tensor, history: Tensor, weight: Tensor, buffer: Tensor, window: Tensor) -> Tensor:
            convolved = ops.tree_causal_conv1d(inputs, history, weight, None, window)
            torch.ops.aten.copy_.default(buffer, inputs)
            return torch.exp(-convolved.float()) + 1

        self._stays(gelu)

    def test_a_convolution_that_something_else_reads_stays(self) -> None:
        def read_twice(inputs: Tensor, history: Tensor, weight: Tensor, buffer: Tensor, window: Tensor) -> Tensor:
            convolved = ops.tree_causal_conv1d(inputs, history, weight, None, window)
            torch.ops.aten.copy_.default(buffer, inputs)
            return _silu(convolved) + convolved

        self._stays(read_twice)

    def test_inputs_that_nothing_keeps_stay(self) -> None:
        def forgotten(inputs: Tensor, history: Tensor, weight: Tensor, buffer: Tensor, window: Tensor) -> Tensor:
            return _silu(ops.tree_causal_conv1d(inputs, history, weight, None, window))

        self._stays(forgotten)

    def test_inputs_kept_in_another_dtype_stay(self) -> None:
        def widened(inputs: Tensor, history: Tensor, weight: Tensor, buffer: Tensor, window: Tensor) -> Tensor:
            result = _silu(ops.tree_causal_conv1d(inputs, history, weight, None, window))
            torch.ops.aten.copy_.default(buffer, torch.ops.aten.copy.default(buffer.float(), inputs))
            return result

        self._stays(widened)

    def test_a_kernel_of_one_or_of_five_stays(self) -> None:
        self._stays(_layer, taps=1)
        self._stays(_layer, taps=5)
