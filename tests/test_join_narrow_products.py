"""Narrow products of the same rows become one op, two and two; wide, many, short and float32 ones stay the library's."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import TestCase

from treewy_inductor.passes import join_narrow_products


def _gates(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    rows = x.shape[0] * x.shape[1]
    first = torch.mm(x.view(rows, -1), a.t()).sigmoid()
    second = torch.mm(x.view(rows, -1), (b * 2).t())
    return first[:, :1] + second


def _arguments(tokens: int = 5, size: int = 256, columns: int = 3, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    return torch.randn(2, tokens, size).to(dtype), torch.randn(columns, size).to(dtype), torch.randn(4, size).to(dtype)


def _graph(function: object, arguments: tuple[Tensor, ...]) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*arguments)  # type: ignore[arg-type]


class JoinNarrowProducts(TestCase):
    def test_graph_afterwards(self) -> None:
        module = _graph(_gates, _arguments())
        self.assertEqual(join_narrow_products(module.graph), 1)
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        self.assertExpectedInline(
            "\n".join(f"{node.name} = {getattr(node.target, '__name__', node.target)}{node.args}" for node in calls),
            """\
view = view.default(x_1, [10, -1])
t = t.default(a_1,)
mul = mul.Tensor(b_1, 2)
t_1 = t.default(mul,)
narrow_products_default = narrow_products.default(view, t, t_1)
getitem = getitem(narrow_products_default, 0)
sigmoid = sigmoid.default(getitem,)
getitem_1 = getitem(narrow_products_default, 1)
slice_1 = slice.Tensor(sigmoid, 1, 0, 1)
add = add.Tensor(slice_1, getitem_1)""",
        )

    def test_it_computes_what_it_did(self) -> None:
        arguments = _arguments()
        module = _graph(_gates, arguments)
        self.assertEqual(join_narrow_products(module.graph), 1)
        module.recompile()
        self.assertEqual(module(*arguments), _gates(*arguments))

    def test_of_three_the_third_stays(self) -> None:
        def three(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            rows = x.view(10, -1)
            return torch.mm(rows, a.t()) + torch.mm(rows, b.t())[:, :3] + torch.mm(rows, a.t() * 2)

        module = _graph(three, _arguments())
        self.assertEqual(join_narrow_products(module.graph), 1)
        self.assertEqual(len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)), 1)

    def test_others_stay(self) -> None:
        def different_rows(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return torch.mm(x.view(10, -1), a.t())[:, :1] + torch.mm((x + 1).view(10, -1), b.t())

        cases = (
            (_gates, _arguments(columns=65)),
            (_gates, _arguments(tokens=1025)),
            (_gates, _arguments(size=128)),
            (_gates, _arguments(dtype=torch.float32)),
            (different_rows, _arguments()),
        )
        for function, arguments in cases:
            module = _graph(function, arguments)
            before = str(module.graph)
            self.assertEqual(join_narrow_products(module.graph), 0)
            self.assertEqual(str(module.graph), before)
