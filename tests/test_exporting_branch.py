"""A model that is compiled is not being exported: its chunk rule is traced with triangular solves, not as a loop over rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from transformers.utils import is_torchdynamo_exporting

from tests.tiny_models import tiny_model
from treewy_inductor.models.exporting_branch import trace_the_ordinary_branch
from treewy_inductor.models.tree_cache import TreeCache


def added(x: Tensor) -> Tensor:
    return x + (1 if is_torchdynamo_exporting() else 0)


def test_a_compiled_function_is_not_being_exported() -> None:
    trace_the_ordinary_branch()
    torch._dynamo.reset()
    assert torch.compile(added, backend="eager", fullgraph=True)(torch.zeros(1)).item() == 0


def test_a_model_with_a_tree_cache_is_traced_with_two_solves_a_layer() -> None:
    class Seen(Exception):
        pass

    counts: list[Counter[str]] = []

    def backend(module: fx.GraphModule, *_: Any) -> Any:
        counts.append(Counter(getattr(node.target, "__name__", str(node.target)) for node in module.graph.nodes))
        raise Seen

    model = tiny_model()
    cache = TreeCache(model.config, 1, 32, 5)
    cache.prefill(model, torch.ones(1, 4, dtype=torch.int64))
    cache.set_tree(torch.tensor([[-1, 0, 0, 1, 1]], dtype=torch.int32))
    with pytest.raises(Exception, match="Seen"), torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(**cache.inputs(torch.ones(1, 5, dtype=torch.int64)))
    linear = sum(kind == "linear_attention" for kind in model.config.layer_types)
    assert counts[0]["linalg_solve_triangular"] == 2 * linear
    assert counts[0]["clone"] < 10 * linear
