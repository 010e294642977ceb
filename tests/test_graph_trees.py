"""What Inductor's CUDA graphs (``mode="reduce-overhead"``) ask of a step, as far as a machine without a GPU can tell.

They take a graph that overwrites inputs only if each of those has a fixed address, and one that begins at a multiple of 16
bytes. ``test_gpu_step.py`` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.tiny_models import tiny_model
from treewy_inductor import compat
from treewy_inductor.aligned_zeros import aligned_zeros
from treewy_inductor.backend import treewy
from treewy_inductor.models.tree_cache import TreeCache
from treewy_inductor.tree import DraftTree

# Three rows of 13 nodes with two key heads: 312 bytes of key scales a layer.
ROWS, NODES = 3, 13


def overwritten(graph: fx.Graph) -> list[int]:
    """Return which inputs ``graph`` overwrites."""
    inputs = graph.find_nodes(op="placeholder")
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return [inputs.index(copy.args[0]) for copy in copies]


@pytest.mark.parametrize("policy", ["reconstruct", "replay", "fused", "store_all"])
def test_what_a_step_overwrites_has_a_fixed_aligned_address(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool, int]] = []

    def compile_inner(module: fx.GraphModule, inputs: Sequence[Any], static_input_idxs: Sequence[int] = (), **rest: Any) -> Any:
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]
        run = run_op_by_op(module, inputs, **rest)

        def note(args: list[Any]) -> Any:
            seen.extend((names[i], i in static_input_idxs, args[i].data_ptr() % 16) for i in overwritten(module.graph))
            return run(args)

        note._boxed_call = True  # type: ignore[attr-defined]
        return note

    run_op_by_op = compat._run_op_by_op
    monkeypatch.setattr(compat, "_run_op_by_op", compile_inner)
    model = tiny_model()
    flush_every = 7 if policy == "replay" else None
    cache = TreeCache(model.config, ROWS, 64, NODES, mamba_state_commit=policy, flush_every=flush_every)
    cache.prefill(model, torch.arange(15).reshape(ROWS, 5))
    cache.set_tree(DraftTree.from_widths((3, 3)))
    torch._dynamo.reset()
    options = {"treewy.codegen": False, "force_disable_caches": True}
    with torch.no_grad():
        step = torch.compile(model, backend=treewy, fullgraph=True, dynamic=False, options=options)
        step(**cache.inputs(torch.ones(ROWS, NODES, dtype=torch.int64)))
    # Of each of three linear layers the convolution's inputs and what the policy keeps, of one other keys and values. What is
    # fused overwrites the state as well, and the length that all layers' trunks have.
    kept = {"reconstruct": 5, "replay": 5, "fused": 6, "store_all": 2}
    assert len(seen) == 3 * kept[policy] + 2 + (policy == "fused")
    assert [each for each in seen if not each[1] or each[2]] == []


def test_layers_begin_at_multiples_of_16_bytes_and_are_contiguous() -> None:
    for dtype, shape in (
        (torch.float32, (3, 13, 2)),
        (torch.bfloat16, (1, 7)),
        (torch.float64, (3, 5)),
        (torch.float32, (4, 0)),
    ):
        held = aligned_zeros(5, *shape, dtype=dtype, device=torch.device("cpu"))
        assert held.shape == (5, *shape) and held.dtype == dtype and not held.any()
        layers: list[Tensor] = list(held)
        assert all(layer.is_contiguous() and layer.data_ptr() % 16 == 0 for layer in layers)
        for layer, value in zip(layers, range(5), strict=True):
            layer.fill_(value)
        assert all((layer == value).all() for layer, value in zip(layers, range(5), strict=True))
