"""Write new nodes into a graph with everything that later passes, caches and profilers read from a node."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from treewy_inductor import compat

aten, prims = torch.ops.aten, torch.ops.prims

ORIGIN = ("stack_trace", "nn_module_stack", "from_node", "source_fn_stack", "fwd_nn_module_stack", "original_aten")


def emit(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call at the graph's insertion point, its origin that of ``like``, its value computed from its inputs' values."""
    node = graph.call_function(target, args, kwargs)
    node.meta.update({key: like.meta[key] for key in ORIGIN if key in like.meta})
    value = like.meta["val"]
    mode = compat.fake_mode_of(value[0] if isinstance(value, tuple | list) else value)
    real_args, real_kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: each.meta["val"])
    with mode or nullcontext():
        node.meta["val"] = target(*real_args, **real_kwargs)
    return node


def emit_cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Cast a node to a dtype; returns it as it is if it has that dtype."""
    if node.meta["val"].dtype == dtype:
        return node
    return emit(graph, node, prims.convert_element_type.default, node, dtype)


def emit_layout(graph: fx.Graph, node: fx.Node, order: list[int], shape: tuple[int, ...]) -> fx.Node:
    """Permute a node's axes, then reshape it; emits nothing where that changes nothing."""
    if order != list(range(len(order))):
        node = emit(graph, node, aten.permute.default, node, order)
    if tuple(node.meta["val"].shape) != shape:
        node = emit(graph, node, aten.reshape.default, node, list(shape))
    return node


def emit_contiguous_like(graph: fx.Graph, node: fx.Node, old: Tensor) -> fx.Node:
    """Make a node contiguous where the value that it stands for was, so that what views it still may."""
    if old.is_contiguous() and not node.meta["val"].is_contiguous():
        return emit(graph, node, aten.clone.default, node, memory_format=torch.contiguous_format)
    return node
