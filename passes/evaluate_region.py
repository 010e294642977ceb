"""Run a part of a graph on real tensors in float64, whatever dtypes it was traced with.

Rounding hides in float64, so a region that agrees there agrees in exact arithmetic; whether it rounds on the way is a
question of its structure, see :mod:`treewy_inductor.passes.find_rounding`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def evaluate(
    nodes: Sequence[fx.Node],
    given: Mapping[fx.Node, Tensor],
    wanted: Collection[fx.Node],
    widen: bool = True,
    each: Callable[[fx.Node, Any], None] | None = None,
) -> dict[fx.Node, Any]:
    """Run nodes in the order given and return the values of those that are wanted.

    Args:
        nodes: every node between ``given`` and ``wanted``, each after its inputs; operators, and attributes of the graph's
            module.
        given: float64 tensors that stand for nodes outside.
        wanted: nodes of ``nodes`` or ``given``.
        widen: False runs the nodes in the dtypes that they were traced with.
        each: is shown the value of every node that is run, most of which are not kept.
    """
    values: dict[fx.Node, Any] = dict(given)
    last_reader = {source: node for node in nodes for source in node.all_input_nodes}
    kept = set(wanted)
    with torch.no_grad():
        for node in nodes:
            if node in values:
                continue
            values[node] = _in_float64(_run(node, values, widen)) if widen else _run(node, values, widen)
            if each is not None:
                each(node, values[node])
            for source in node.all_input_nodes:
                if last_reader[source] is node and source not in kept:
                    values.pop(source, None)
    return {node: values[node] for node in wanted}


def _run(node: fx.Node, values: Mapping[fx.Node, Any], widen: bool) -> Any:
    if node.op == "get_attr":
        value = node.graph.owning_module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return _module_in_float64(value) if widen and isinstance(value, fx.GraphModule) else value
    assert node.op == "call_function"
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: values[each])
    if widen:
        args, kwargs = fx.node.map_aggregate((args, kwargs), _wider)
    # What stands for a node outside is laid out plainly, so that a view of it may need a copy here.
    target = torch.ops.aten.reshape.default if node.target is torch.ops.aten.view.default else node.target
    return target(*args, **kwargs)  # type: ignore[operator]


def _wider(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in _FLOATS else argument


def _in_float64(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.dtype in _FLOATS else value
    if isinstance(value, list | tuple):
        return type(value)(_in_float64(each) for each in value)
    return value


def _module_in_float64(module: fx.GraphModule) -> fx.GraphModule:
    # The body of a scan is a graph of its own.
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = fx.GraphModule(module, graph)
    for node in copy.graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), _wider)
    copy.recompile()
    return copy
