"""Apply to all tokens at once what a loop applies to each token's decay or beta.

    before    for t: ... exp(-softplus(a[:, t])) ...
    lifted    exp(-softplus(a))

A loop that takes raw projections leaves no node that holds all decays. What it computes from one token's value alone,
element by element, means the same on the tensor of all tokens.

    B batch   N nodes   HV value heads
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from treewy_inductor.passes.emit_node import emit
from treewy_inductor.passes.evaluate_region import evaluate
from treewy_inductor.passes.propose_region import Region

aten, prims = torch.ops.aten, torch.ops.prims

MAX_LIFTS = 12


@dataclass(frozen=True)
class Lift:
    """``result`` as a function of ``token``, the first token's value, computed by the elementwise ``nodes`` between."""

    token: fx.Node
    nodes: tuple[fx.Node, ...]
    result: fx.Node

    def apply(self, value: Tensor) -> Tensor:
        """Return the function of a value of any shape."""
        applied: Tensor = evaluate(self.nodes, {self.token: value}, [self.result])[self.result]
        return applied

    def emit(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        """Write the function of ``node`` into the graph."""
        again = {self.token: node}
        for each in self.nodes:
            args, kwargs = fx.node.map_arg((each.args, dict(each.kwargs)), lambda arg: again.get(arg, arg))
            again[each] = emit(graph, each, each.target, *args, **kwargs)
        return again[self.result]


def lifts_of(region: Region, node: fx.Node) -> list[Lift]:
    """Return every float that a region computes element by element from the first token of a frontier node."""
    token = next((user for user in region.nodes if _takes_first_token(region, user, node)), None)
    if token is None:
        return []
    found: list[fx.Node] = []
    for each in region.nodes:
        sources = each.all_input_nodes
        is_own = bool(sources) and all(source is token or source in found for source in sources)
        if is_own and (torch.Tag.pointwise in getattr(each.target, "tags", ()) or each.target is aten.where.self):
            found.append(each)
    lifts = [Lift(token, _up_to(found, each), each) for each in found if each.meta["val"].is_floating_point()]
    return lifts[:MAX_LIFTS]


def _takes_first_token(region: Region, user: fx.Node, node: fx.Node) -> bool:
    axis = region.labels[node]
    if user.target is aten.select.int and user.args[0] is node:
        return bool(int(str(user.args[1])) % node.meta["val"].dim() == axis and user.args[2] == 0)
    if user.target is operator.getitem and user.args[1] == 0:
        unbind = user.args[0]
        return isinstance(unbind, fx.Node) and unbind.target is aten.unbind.int and unbind.args[0] is node
    return False


def _up_to(nodes: list[fx.Node], result: fx.Node) -> tuple[fx.Node, ...]:
    needed, todo = {result}, [result]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source in nodes and source not in needed:
                needed.add(source)
                todo.append(source)
    return tuple(node for node in nodes if node in needed)
