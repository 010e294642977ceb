"""With flash-linear-attention installed nothing breaks a graph: its rules are traced in plain form, proven and rewritten."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest
import torch

from bench.marked_rule import MarkedRule
from tests.trees import BRANCHES
from treewy_inductor import records
from treewy_inductor.models.fla_rules import RULES, plain_rule, trace_through_fla
from treewy_inductor.reference import literal_gated_delta
from treewy_inductor.tree import DraftTree

NORMED = {"use_qk_l2norm_in_kernel": True}


def _case(vector_decay: bool) -> MarkedRule:
    heads = (2, 2) if vector_decay else (2, 4)
    return MarkedRule((DraftTree.from_parents(BRANCHES),), heads=heads, vector_decay=vector_decay)


@pytest.mark.parametrize("vector_decay", [False, True])
def test_plain_rule_is_the_literal_one(vector_decay: bool) -> None:
    x = _case(vector_decay).operands
    args, N = [x[name] for name in ("q", "k", "v", "g", "beta")], len(BRANCHES)
    output, end = plain_rule(*args, initial_state=x["state"], output_final_state=True, **NORMED)
    chain = torch.arange(-1, N - 1)[None]
    args = [x[name].double() for name in ("q", "k", "v", "g", "beta", "state")]
    expected, states = literal_gated_delta(*args, chain, x["q"].shape[-1] ** -0.5, 1e-6)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(end.double(), states[:, -1], rtol=1e-5, atol=1e-5)


def test_options_that_change_the_rule_are_refused() -> None:
    x = _case(False).operands
    with pytest.raises(NotImplementedError, match="state_v_first"):
        plain_rule(*(x[name] for name in ("q", "k", "v", "g", "beta")), state_v_first=True, cu_seqlens=None)


def test_an_installation_of_fla_that_cannot_be_imported_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = types.ModuleType("fla")
    broken.__spec__ = importlib.machinery.ModuleSpec("fla", None)
    monkeypatch.setitem(sys.modules, "fla", broken)
    for module in RULES:
        # Importing it then raises ImportError, as it does if a package that fla needs is missing.
        monkeypatch.setitem(sys.modules, module, None)
    assert trace_through_fla.__wrapped__() is False


@pytest.mark.parametrize("vector_decay", [False, True])
def test_flas_own_function_is_traced_and_proven(vector_decay: bool) -> None:
    pytest.importorskip("fla")
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    assert trace_through_fla()
    case = _case(vector_decay)
    outputs, found = case.compiled(chunk_kda if vector_decay else chunk_gated_delta_rule, **NORMED)
    assert [type(record) for record in found] == [records.Proven]
    args = [case.operands[name].double() for name in ("q", "k", "v", "g", "beta", "state")]
    expected, _ = literal_gated_delta(*args, torch.tensor([BRANCHES]), case.dims[0] ** -0.5, 1e-6)
    torch.testing.assert_close(outputs[0].double(), expected, rtol=1e-5, atol=1e-5)
