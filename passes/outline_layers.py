"""Make equal layers one subgraph that each of them calls, so that Inductor lowers, schedules and compiles it once.

    before    norm, recurrence, mlp of layer 0 -> norm, recurrence, mlp of layer 1 -> ...
    after     invoke_subgraph(layer, weights 0) -> invoke_subgraph(layer, weights 1) -> ...

Where a layer begins and ends is proposed by the model's own module paths, such as ``model.layers.3``; only runs of nodes that
are equal node by node, with operands of equal shape, stride and type, become calls of one subgraph. A run is a contiguous
piece of the graph's order, so no value leaves it and comes back. What updates a buffer in place stays outside, as do the
copies into the cache's buffers at the graph's end, since a subgraph must not write to its operands; so do views that leave a
run, since results must not share memory with operands or each other. A layer that has no equal stays as it is.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from treewy_inductor import compat, records
from treewy_inductor.passes.region_key import description

aten = torch.ops.aten

SMALLEST = 8
_NUMBERED = re.compile(r"^(.*?\.\d+)(\.|$)")


@dataclass(frozen=True)
class Run:
    """Nodes next to each other, what they read from outside in the order of first use, and what is read of them outside."""

    nodes: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]

    @property
    def key(self) -> str:
        """What two runs have in common exactly if one can stand for the other."""
        place = {node: i for i, node in enumerate(self.nodes)}
        is_operand = set(self.operands).__contains__
        strides = [_layout(node) for node in (*self.operands, *self.nodes)]
        return f"{description((*self.operands, *self.nodes), is_operand)}\n{strides}\n{[place[node] for node in self.results]}"


def outline_layers(graph: fx.Graph) -> int:
    """Replace each run that has an equal by a call of their common subgraph; return how many calls were written."""
    equal: dict[str, list[list[fx.Node]]] = {}
    for nodes in _proposed(graph):
        run = _run_of(nodes)
        if run is not None:
            equal.setdefault(run.key, []).append(nodes)
    calls = 0
    for pieces in equal.values():
        if len(pieces) < 2:
            continue
        name = ""
        for nodes in pieces:
            # Anew, since operands may have become the results of calls meanwhile.
            run = _run_of(nodes)
            assert run is not None
            name = name or compat.add_subgraph(graph, "treewy_layer", _subgraph_of(run))
            _call(graph, name, run)
        calls += len(pieces)
    if calls:
        graph.lint()
    return calls


def _proposed(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return pieces of the graph that belong to one numbered module each and may be moved to where each one begins."""
    stays = _in_place_updates(graph)
    pieces: list[list[fx.Node]] = [[]]
    layer, until = "", 0
    # What stays outside runs behind the piece, which therefore ends where something needs it.
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        label = _layer_of(node)
        is_outside = node in stays or not _is_movable(node) or (_is_item(node) and node.args[0] not in pieces[-1])
        is_late = any(each in behind for each in node.all_input_nodes)
        if (label and label != layer) or (is_late and not is_outside):
            # Nodes without a module belong to a piece only where it goes on behind them.
            del pieces[-1][until:]
            pieces.append([])
            layer, until, behind = label or layer, 0, set()
        if is_outside:
            behind.add(node)
        elif label or pieces[-1]:
            pieces[-1].append(node)
            until = len(pieces[-1]) if label else until
    del pieces[-1][until:]
    return [piece for piece in pieces if len(piece) >= SMALLEST]


def _layer_of(node: fx.Node) -> str:
    numbered = _NUMBERED.match(records.module_of(node))
    return numbered.group(1) if numbered else ""


def _is_movable(node: fx.Node) -> bool:
    if _is_item(node):
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags and _argument(node, "dropout_p") != 0
    return not node.target._schema.is_mutable and not is_random


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _argument(node: fx.Node, name: str) -> object:
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(name)
            return argument.default_value if given is None else given
    return None


def _in_place_updates(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes by which a buffer becomes what is copied into it at the end: Inductor makes them updates in place."""
    found: set[fx.Node] = set()
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        buffer, value = copy.args[:2]
        chain = []
        while isinstance(value, fx.Node) and value.op == "call_function":
            chain.append(value)
            value = value.args[0] if value.args else None
        if value is buffer:
            found.update(chain)
    return found


def _run_of(nodes: Sequence[fx.Node]) -> Run | None:
    """Find what goes into and out of a piece; None if that is anything but tensors of fixed shape."""
    inside = set(nodes)
    operands = dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside)
    stays: set[fx.Node] = set()
    results = []
    for node in reversed(nodes):
        if all(user in inside and user not in stays for user in node.users):
            continue
        if _is_view(node):
            stays.add(node)
        else:
            results.append(node)
    run = Run(tuple(nodes), tuple(operands), tuple(reversed(results)))
    return run if results and all(_is_fixed(node) for node in (*run.operands, *run.results)) else None


def _is_view(node: fx.Node) -> bool:
    if _is_item(node):
        return _is_view(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target is aten._unsafe_view.default or any(each.alias_info is not None for each in node.target._schema.returns)


def _is_fixed(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(
        type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset())
    )


def _layout(node: fx.Node) -> tuple[tuple[int, ...], bool] | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    # Kernels on a GPU are compiled for addresses that are multiples of 16 bytes, or for any.
    return tuple(value.stride()), value.storage_offset() * value.element_size() % 16 == 0


def _subgraph_of(run: Run) -> fx.GraphModule:
    inner = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, operand in enumerate(run.operands):
        copies[operand] = inner.placeholder(f"operand_{i}")
        copies[operand].meta["val"] = operand.meta["val"]
    for node in run.nodes:
        copies[node] = inner.node_copy(node, copies.__getitem__)
    inner.output(tuple(copies[node] for node in run.results))
    inner.eliminate_dead_code()
    inner.lint()
    return fx.GraphModule(torch.nn.Module(), inner)


def _call(graph: fx.Graph, name: str, run: Run) -> None:
    with graph.inserting_before(run.nodes[0]):
        subgraph = graph.get_attr(name)
        call = graph.call_function(compat.INVOKE_SUBGRAPH, (subgraph, name, *run.operands))
        call.meta.update(run.results[-1].meta)
        call.meta["val"] = tuple(node.meta["val"] for node in run.results)
        for i, node in enumerate(run.results):
            result = graph.call_function(operator.getitem, (call, i))
            result.meta.update(node.meta)
            node.replace_all_uses_with(result)
    for node in reversed(run.nodes):
        if not node.users:
            graph.erase_node(node)
