"""Rewriting of recurrences: the graphs that come out, whole."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from expecttest import TestCase
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from bench.marked_rule import MarkedRule
from tests.trees import BRANCHES
from treewy_inductor.passes.rewrite_gated_delta import rewrite_gated_delta
from treewy_inductor.reference import literal_gated_delta
from treewy_inductor.tree import DraftTree

PAIR = DraftTree.from_parents([-1, 0])


def graph_of(case: MarkedRule, rule: Callable[..., Any], **kwargs: Any) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    """Trace a rule between markers into functional operators, as the backend's passes meet it."""
    function, args = case.function(rule, **kwargs)
    traced = make_fx(torch.func.functionalize(function), decomposition_table=select_decomp_table(), tracing_mode="fake")
    with torch.no_grad():
        return traced(*args), args


def two_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, **kwargs: Any) -> Any:
    """The rule over two tokens, short enough for its graph to be read; ``decay`` gives a function of g."""
    S, outputs, decay = initial_state, [], kwargs.get("decay", torch.exp)(g)
    for t in range(2):
        S = S * decay[:, t, :, None, None]
        u = beta[:, t, :, None] * (v[:, t] - (S * k[:, t, :, :, None]).sum(-2))
        S = S + k[:, t, :, :, None] * u[:, :, None]
        outputs.append((S * q[:, t, :, :, None]).sum(-2))
    return torch.stack(outputs, 1), S


def repeated_and_normed(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The same in bf16 with grouped heads and a norm."""
    q, k = (x.repeat_interleave(2, 2).float() for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    o, S = two_tokens(q * 0.25, k, v.float(), *args, **kwargs)
    return o.to(v.dtype), S


def text_of(graph: fx.Graph) -> str:
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            value = node.meta["val"]
            shape = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} " if isinstance(value, Tensor) else ""
            name = "getitem" if node.target is operator.getitem else str(node.target)
            lines.append(f"{node.name}: {shape}= {name}({', '.join(map(str, node.args))})")
    return "\n".join(lines)


class GraphTest(TestCase):
    def test_two_tokens_become_one_op(self) -> None:
        module, args = graph_of(MarkedRule((PAIR,), heads=(2, 2), dims=(3, 5)), two_tokens)
        before = len(module.graph.nodes)
        self.assertEqual(rewrite_gated_delta(module.graph), 1)
        self.assertLess(len(module.graph.nodes), before)
        self.assertExpectedInline(
            text_of(module.graph),
            """\
tree_gated_delta_default: = treewy.tree_gated_delta.default(arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, arg5_1, arg6_1, arg7_1, arg8_1, arg9_1, 1.0, -1.0, torch.float32)
getitem_4: float32[1, 2, 2, 5] = getitem(tree_gated_delta_default, 0)
getitem_5: float32[1, 2, 2, 5] = getitem(tree_gated_delta_default, 1)
getitem_6: float32[1, 2, 2] = getitem(tree_gated_delta_default, 2)
getitem_7: float32[1, 2, 2] = getitem(tree_gated_delta_default, 3)""",
        )
        module.recompile()
        q, k, v, g, beta, state = (x.double() for x in args[:6])
        expected, _ = literal_gated_delta(q, k, v, g, beta, state, torch.tensor([[-1, 0]]), 1.0, -1.0)
        torch.testing.assert_close(module(*args)[0].double(), expected, rtol=1e-5, atol=1e-6)

    def test_raw_bf16_key_is_taken_before_repeat_cast_and_norm(self) -> None:
        module, _ = graph_of(MarkedRule((PAIR,), dims=(3, 5), dtype=torch.bfloat16), repeated_and_normed)
        self.assertEqual(rewrite_gated_delta(module.graph), 1)
        self.assertExpectedInline(
            text_of(module.graph),
            """\
tree_gated_delta_default: = treewy.tree_gated_delta.default(arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, arg5_1, arg6_1, arg7_1, arg8_1, arg9_1, 0.25, 1e-06, torch.bfloat16)
getitem_4: bfloat16[1, 2, 4, 5] = getitem(tree_gated_delta_default, 0)
getitem_5: float32[1, 2, 4, 5] = getitem(tree_gated_delta_default, 1)
getitem_6: float32[1, 2, 4] = getitem(tree_gated_delta_default, 2)
getitem_7: float32[1, 2, 2] = getitem(tree_gated_delta_default, 3)""",
        )

    def test_decay_itself_gets_a_finite_logarithm(self) -> None:
        module, _ = graph_of(MarkedRule((PAIR,), heads=(2, 2), dims=(3, 5)), two_tokens, decay=torch.sigmoid)
        self.assertEqual(rewrite_gated_delta(module.graph), 1)
        self.assertExpectedInline(
            text_of(module.graph),
            """\
sigmoid: float32[1, 2, 2] = aten.sigmoid.default(arg3_1)
clamp_min_default: float32[1, 2, 2] = aten.clamp_min.default(sigmoid, 1.1754943508222875e-38)
log_default: float32[1, 2, 2] = aten.log.default(clamp_min_default)
tree_gated_delta_default: = treewy.tree_gated_delta.default(arg0_1, arg1_1, arg2_1, log_default, arg4_1, arg5_1, arg6_1, arg7_1, arg8_1, arg9_1, 1.0, -1.0, torch.float32)
getitem_4: float32[1, 2, 2, 5] = getitem(tree_gated_delta_default, 0)
getitem_5: float32[1, 2, 2, 5] = getitem(tree_gated_delta_default, 1)
getitem_6: float32[1, 2, 2] = getitem(tree_gated_delta_default, 2)
getitem_7: float32[1, 2, 2] = getitem(tree_gated_delta_default, 3)""",
        )

    def test_new_nodes_say_where_they_come_from(self) -> None:
        module, _ = graph_of(MarkedRule((DraftTree.from_parents(BRANCHES),), heads=(2, 2)), two_tokens)
        self.assertEqual(rewrite_gated_delta(module.graph), 0)
        module, _ = graph_of(MarkedRule((PAIR,), heads=(2, 2)), two_tokens)
        for node in module.graph.nodes:
            node.meta["stack_trace"] = f"origin of {node.name}"
            node.meta["nn_module_stack"] = {"layer": ("layer", torch.nn.Module)}
        self.assertEqual(rewrite_gated_delta(module.graph), 1)
        for node in module.graph.nodes:
            if node.op == "call_function":
                self.assertIn("origin of", node.meta["stack_trace"])
                self.assertIn("layer", node.meta["nn_module_stack"])
                self.assertIn("val", node.meta)
