"""Recognition: every form in which transformers writes the rule is proven at its deepest cut; each refusal says why."""

from __future__ import annotations

import importlib
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.marked_rule import MarkedRule
from tests.test_rewrite_gated_delta import graph_of, two_tokens
from tests.trees import BRANCHES, CHAIN, random_parents
from treewy_inductor import ops, records
from treewy_inductor.passes.recognize_gated_delta import Recurrence, recognize
from treewy_inductor.reference import literal_gated_delta
from treewy_inductor.tree import DraftTree

modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
# The package re-exports the function under the module's name.
rewriting = importlib.import_module("treewy_inductor.passes.rewrite_gated_delta")
CHECKED = {"treewy.check": True}
PAIR = DraftTree.from_parents([-1, 0])


def _grouped(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Repeat key heads before the rule, as transformers 5.17 does; the rule of later versions finds them repeated."""

    def run(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
        repeats = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (q, k))
        return rule(q, k, v, **kwargs)

    return run


def _exporting(*args: Any, **kwargs: Any) -> Any:
    """The form without a triangular solve: row after row, written into itself."""
    was = modeling.is_torchdynamo_exporting
    modeling.is_torchdynamo_exporting = lambda: True
    try:
        return _grouped(modeling.torch_chunk_gated_delta_rule)(*args, **kwargs)
    finally:
        modeling.is_torchdynamo_exporting = was


CHUNK = _grouped(modeling.torch_chunk_gated_delta_rule)
STEPS = _grouped(modeling.torch_recurrent_gated_delta_rule)
KIMI = kimi.chunk_kimi_delta_attention
FORMS = {
    "chunk, padded": (CHUNK, 9, {}),
    "chunk, 64 nodes": (CHUNK, 64, {}),
    "two chunks": (CHUNK, 70, {}),
    "chunk, bf16": (CHUNK, 9, {"dtype": torch.bfloat16}),
    "chunk, fp16": (CHUNK, 64, {"dtype": torch.float16}),
    "chunk, square": (CHUNK, 9, {"heads": (2, 2), "dims": (8, 8)}),
    "step by step": (STEPS, 9, {}),
    "step by step, bf16": (STEPS, 9, {"dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normed", [True, False])
def test_form_is_proven_at_its_deepest_cut_and_right_on_trees(form: str, normed: bool) -> None:
    rule, nodes, kwargs = FORMS[form]
    parents = [random_parents(nodes, seed) for seed in (1, 2)]
    case = MarkedRule(tuple(DraftTree.from_parents(each) for each in parents), **kwargs)
    if not normed:
        # Keys as long as they come make the rule explode, in any form.
        rule = _shortened(rule)
    outputs, found = case.compiled(rule, options=CHECKED, use_qk_l2norm_in_kernel=normed)
    (record,) = found
    assert isinstance(record, records.Proven)
    assert record.error < 1e-9 and record.runner_up > 1e-3
    assert record.facts["key_dtype"] == record.facts["out_dtype"] == str(case.dtype).removeprefix("torch.")
    assert record.facts["key_heads"] == case.heads[0]
    assert record.facts["norm_eps"] == (1e-6 if normed else -1.0)
    x = {name: value.double() for name, value in case.operands.items()}
    shorter = 1.0 if normed else 0.25
    q, k = x["q"] * shorter, x["k"] * shorter
    scale = case.dims[0] ** -0.5
    expected, _ = literal_gated_delta(
        q, k, x["v"], x["g"], x["beta"], x["state"], torch.tensor(parents), scale, 1e-6 if normed else -1.0
    )
    # One rounding of the output to its dtype; sums of up to 70 terms in float32.
    tolerance = 2 * torch.finfo(case.dtype).eps if case.dtype != torch.float32 else 1e-5
    assert _relative(outputs[0], expected) < tolerance


def _shortened(rule: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, *rest, **kwargs: rule(q * 0.25, k * 0.25, *rest, **kwargs)


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def test_row_loop_of_the_exporting_branch_is_proven() -> None:
    case = MarkedRule((DraftTree.from_parents(BRANCHES),))
    module, _ = graph_of(case, _exporting, use_qk_l2norm_in_kernel=True)
    assert not any("solve" in str(node.target) for node in module.graph.nodes)
    (found,) = recognize(module.graph)
    assert isinstance(found, Recurrence), found.sentence()
    assert found.cuts["key"].heads == 2 and found.norm_eps == 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decay_for_each_channel_is_proven(dtype: torch.dtype) -> None:
    case = MarkedRule((DraftTree.from_parents(BRANCHES),), heads=(2, 2), vector_decay=True, dtype=dtype)
    outputs, found = case.compiled(KIMI, options=CHECKED, use_qk_l2norm_in_kernel=True)
    (record,) = found
    assert isinstance(record, records.Proven)
    assert record.facts["vector_decay"] and record.runner_up > 1e-3
    x = {name: value.double() for name, value in case.operands.items()}
    expected, _ = literal_gated_delta(
        *(x[name] for name in ("q", "k", "v", "g", "beta", "state")), torch.tensor([BRANCHES]), case.dims[0] ** -0.5, 1e-6
    )
    assert _relative(outputs[0], expected) < (1e-5 if dtype == torch.float32 else 8e-3)


def test_equal_layers_are_proven_once() -> None:
    case = MarkedRule((DraftTree.from_parents(BRANCHES),))

    def two_layers(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Any:
        tree, buffers = rest[3:7], rest[7:]
        g, beta, state = rest[:3]
        results = []
        for layer in (0, 1):
            start = ops.state_in(state, *tree, layer, 0)
            kwargs = {"g": g + layer, "beta": beta, "initial_state": start, "output_final_state": True}
            o, end = CHUNK(q, k, v, **kwargs)
            results += [o, *ops.state_out(end, *buffers, layer, 0)]
        return results

    _, args = case.function(CHUNK)
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(torch.func.functionalize(two_layers), decomposition_table=select_decomp_table(), tracing_mode="fake")
    first, second = recognize(traced(*args).graph)
    assert isinstance(first, Recurrence) and isinstance(second, Recurrence)
    # g + layer is computed outside of what was proven, from whatever g is.
    assert (first.record.layer, second.record.layer) == (0, 1)
    assert first.record.seconds > 0


@pytest.mark.parametrize("part", ["_beta", "_log_decay"])
def test_check_on_a_tree_catches_an_operand_written_wrongly(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rewriting, part, lambda graph, found: rewriting._constant(graph, found, 0.5 if part == "_beta" else -0.5)
    )
    case = MarkedRule((DraftTree.from_parents(BRANCHES),))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="on a random tree"):
        case.compiled(CHUNK, options=CHECKED, use_qk_l2norm_in_kernel=True)


class RefusalTest(unittest.TestCase):
    def _refused(self, case: MarkedRule, rule: Callable[..., Any], part: str, **kwargs: Any) -> records.Refused:
        module, _ = graph_of(case, rule, **kwargs)
        before = str(module.graph)
        (found,) = recognize(module.graph)
        assert isinstance(found, records.Refused), found
        self.assertIn(part, found.reason)
        self.assertEqual(str(module.graph), before)
        return found

    def test_rounding_inside_is_named(self) -> None:
        def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, **_: Any) -> Any:
            o, S = two_tokens(q, k, v, g, beta, initial_state.bfloat16())
            return o, S.float()

        found = self._refused(MarkedRule((PAIR,), heads=(2, 2)), rule, "rounds to bfloat16")
        self.assertIn("convert_element_type", found.op)

    def test_decay_rounded_inside_is_named(self) -> None:
        def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, **_: Any) -> Any:
            return two_tokens(q, k, v, g, beta, initial_state, decay=lambda g: _RoundedLate(g))

        self._refused(MarkedRule((PAIR,), heads=(2, 2)), rule, "rounds to float16")

    def test_key_wider_than_the_cache_keeps_it(self) -> None:
        case = MarkedRule((PAIR,), heads=(2, 2), keys_dtype=torch.bfloat16)
        self._refused(case, two_tokens, "the cache keeps keys in torch.bfloat16")

    def test_more_key_heads_than_the_cache_keeps(self) -> None:
        def rule(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Every head has a key of its own, made from its group's.
            q, k = (x.repeat_interleave(2, 2) * torch.arange(1, 5)[:, None] / 8 for x in (q, k))
            return two_tokens(q, k, v, *args, **kwargs)

        self._refused(MarkedRule((PAIR,)), rule, "proven with 4 heads, and the cache keeps 2")

    def test_state_that_is_also_returned(self) -> None:
        def rule(*args: Any, **kwargs: Any) -> Any:
            o, S = two_tokens(*args, **kwargs)
            return torch.cat([o.flatten(), S.sum()[None]]), S

        self._refused(MarkedRule((PAIR,), heads=(2, 2)), rule, "read outside")

    def test_parameter_inside_the_loop(self) -> None:
        def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, **_: Any) -> Any:
            return two_tokens(q, k, v, g, beta, initial_state + beta.sum())

        self._refused(MarkedRule((PAIR,), heads=(2, 2)), rule, "off by")

    def test_fewer_roles_than_a_recurrence_has(self) -> None:
        def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, **_: Any) -> Any:
            S = initial_state + torch.einsum("bnhk,bnhv->bhkv", k, v)
            return torch.einsum("bhkv,bnhk->bnhv", S, k), S

        self._refused(MarkedRule((PAIR,), heads=(2, 2)), rule, "does not look like query, key, value")

    def test_state_that_is_not_carried_on(self) -> None:
        def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, **_: Any) -> Any:
            return two_tokens(q, k, v, g, beta, torch.zeros_like(initial_state) + initial_state.sum() * 0)[0], k.mT @ v

        found = graph_of(MarkedRule((PAIR,), heads=(2, 2), dims=(3, 3)), _forgetful)[0]
        (refusal,) = recognize(found.graph)
        assert isinstance(refusal, records.Refused)
        self.assertIn("does not depend on the state", refusal.reason)

    def test_decay_by_place_in_the_list(self) -> None:
        def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *args: Any, **kwargs: Any) -> Any:
            g = g * torch.arange(1, g.shape[1] + 1)[:, None]
            return CHUNK(q, k, v, g=g, **kwargs)

        self._refused(MarkedRule((DraftTree.from_parents(CHAIN),), heads=(2, 2)), rule, "")

    def test_vector_decay_for_a_cache_of_scalar_ones(self) -> None:
        def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **kwargs: Any) -> Any:
            return KIMI(q, k, v, g=-(k * g[..., None]).sigmoid(), **kwargs)

        self._refused(MarkedRule((PAIR,), heads=(2, 2)), rule, "a decay for each key channel")


def _forgetful(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, **_: Any) -> Any:
    return two_tokens(q, k, v, g, beta, initial_state)[0], torch.einsum("bnhk,bnhv->bhkv", k, v)


class _RoundedLate:
    """A decay that is rounded token by token, where the loop takes it."""

    def __init__(self, log_decay: Tensor) -> None:
        self.log_decay = log_decay

    def __getitem__(self, index: Any) -> Tensor:
        return self.log_decay[index[:2]].exp().half().float()[:, :, None, None]
