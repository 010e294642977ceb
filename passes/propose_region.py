"""Cut out the part of a graph that may be a recurrence, from its tokens' first meeting to its outputs.

            frontier: q k v log_decay beta, one value a token          state_in
                 \\________________________  __________________________/
                                           \\/
                        nodes through which tokens or the state pass
                      /                                              \\
             outputs: one value a token                            state_out

A cut is proposed where tokens first meet; if what lies there does not look like the roles of a recurrence, it moves
towards the inputs one operator at a time. A proposal is no more than that: :mod:`treewy_inductor.passes.certify` decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from treewy_inductor.passes.marked_state import MarkedState
from treewy_inductor.passes.token_axis import PROJECTIONS, Kind, Label, shape_of

aten, prims = torch.ops.aten, torch.ops.prims

MAX_CUTS = 24
MAX_OUTPUTS = 24
VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.clone.default,
    aten.alias.default,
}


class Unlike(Exception):
    """The graph around a state does not have the form of a recurrence; says at which node and why."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


@dataclass(frozen=True)
class Region:
    """A part of a graph: everything between ``frontier`` with ``state_in``, and ``final_state`` with ``outputs``.

    Attributes:
        frontier: nodes with a token axis on which all else depends, in the graph's order.
        nodes: what computes ``outputs`` and the final state from them, in the graph's order.
        outputs: what may be the recurrence's output, latest first.
    """

    marked: MarkedState
    labels: dict[fx.Node, Label]
    frontier: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def propose_regions(marked: MarkedState, labels: dict[fx.Node, Label], order: dict[fx.Node, int]) -> Iterator[Region]:
    """Propose regions for one state, the likeliest first.

    Args:
        labels: of :func:`treewy_inductor.passes.token_axis.label_tokens`.
        order: the place in the graph of each node that something comes of.

    Raises:
        Unlike: the state depends on something that is neither a token's own value nor a constant, or nothing has an
            output's shape.
    """
    cutter = _Cutter(marked, labels, order)
    state_boundary = cutter.boundary(marked.final_state)
    cutter.check(state_boundary)
    if marked.final_state not in cutter.after_state:
        raise Unlike(marked.final_state, "the state that is written does not depend on the state that was read")
    groups: dict[frozenset[fx.Node], list[fx.Node]] = {}
    for node in cutter.outputs():
        boundary = cutter.boundary(node)
        if all(isinstance(labels[each], int) for each in boundary):
            groups.setdefault(state_boundary | boundary, []).append(node)
    if not groups:
        B, N, _, HV, _, V = marked.sizes
        raise Unlike(marked.state_in, f"nothing of {B}x{N}x{HV}x{V} elements is computed from the state and the tokens")
    for boundary, outputs in sorted(groups.items(), key=lambda group: len(group[0])):
        for frontier in cutter.frontiers(boundary):
            region = cutter.region(frontier, outputs[-MAX_OUTPUTS:][::-1])
            if region is not None:
                yield region


class _Cutter:
    def __init__(self, marked: MarkedState, labels: dict[fx.Node, Label], order: dict[fx.Node, int]) -> None:
        self.marked, self.labels, self.order = marked, labels, order
        self.after_state = self._after(marked.state_in)
        self.boundaries: dict[fx.Node, frozenset[fx.Node]] = {marked.state_in: frozenset()}
        self.free: dict[fx.Node, bool] = {}

    def _after(self, start: fx.Node) -> set[fx.Node]:
        # A projection by a weight ends a recurrence's reach: what comes later is another layer's.
        seen, todo = {start}, [start]
        while todo:
            for user in todo.pop().users:
                ends = user.op == "output" or user is self.marked.state_out
                ends = ends or (user.target in PROJECTIONS and self.labels[user] is not Kind.MIXED)
                if user not in seen and user in self.order and not ends:
                    seen.add(user)
                    todo.append(user)
        return seen

    def is_local(self, node: fx.Node) -> bool:
        """Whether a node has a token axis along which nothing was mixed, and does not know the state."""
        return isinstance(self.labels[node], int) and node not in self.after_state

    def is_free(self, node: fx.Node) -> bool:
        """Whether a node is a constant that depends on no input of the graph."""
        todo = [node]
        while todo:
            each = todo[-1]
            unknown = [source for source in each.all_input_nodes if source not in self.free]
            if unknown:
                todo += unknown
                continue
            self.free[each] = each.op != "placeholder" and all(self.free[source] for source in each.all_input_nodes)
            todo.pop()
        return self.free[node]

    def boundary(self, node: fx.Node) -> frozenset[fx.Node]:
        """Return the nodes on which a node depends where tokens have not met yet, and whatever else it reads."""
        todo = [node]
        while todo:
            each = todo[-1]
            if each in self.boundaries:
                todo.pop()
                continue
            passes_through = each in self.after_state or self.labels[each] is Kind.MIXED
            if not passes_through:
                constant = self.labels[each] in (Kind.CONSTANT, Kind.INDEX) and self.is_free(each)
                self.boundaries[each] = frozenset() if constant else frozenset([each])
                continue
            unknown = [source for source in each.all_input_nodes if source not in self.boundaries]
            if unknown:
                todo += unknown
                continue
            self.boundaries[each] = frozenset().union(*(self.boundaries[source] for source in each.all_input_nodes))
        return self.boundaries[node]

    def check(self, boundary: frozenset[fx.Node]) -> None:
        """Refuse a boundary of which some node is no token's own value."""
        for node in sorted(boundary, key=self.order.__getitem__):
            if not isinstance(self.labels[node], int):
                what = "an input of the graph" if node.op == "placeholder" else str(self.labels[node].value)  # type: ignore[union-attr]
                raise Unlike(self._reader(node), f"the state depends on {node.name} beside its tokens ({what})")

    def _reader(self, node: fx.Node) -> fx.Node:
        # An input of the graph has no source line: what takes it into the state has one.
        readers = [user for user in node.users if user in self.after_state or self.labels[user] is Kind.MIXED]
        return min(readers, key=self.order.__getitem__) if node.op == "placeholder" and readers else node

    def outputs(self) -> list[fx.Node]:
        """Return what has as many elements as an output, knows the state, and does not feed the final state."""
        B, N, _, HV, _, V = self.marked.sizes
        feeds, todo = set(), [self.marked.final_state]
        while todo:
            node = todo.pop()
            if node not in feeds and node in self.after_state:
                feeds.add(node)
                todo += node.all_input_nodes
        found = []
        for node in sorted(self.after_state - feeds, key=self.order.__getitem__):
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == B * N * HV * V:
                found.append(node)
        return found

    def frontiers(self, boundary: frozenset[fx.Node]) -> Iterator[tuple[fx.Node, ...]]:
        """Propose frontiers from the tokens' first meeting towards the inputs."""
        frontier = {self._without_views(node) for node in boundary}
        for _ in range(MAX_CUTS):
            yield tuple(sorted(frontier, key=self.order.__getitem__))
            node = self._next_to_open(frontier)
            if node is None:
                return
            frontier = (frontier - {node}) | {self._without_views(each) for each in self._opened(node) or ()}

    def _next_to_open(self, frontier: set[fx.Node]) -> fx.Node | None:
        latest = sorted(frontier, key=self.order.__getitem__, reverse=True)
        can_open = [node for node in latest if self._opened(node) is not None]
        for node in can_open:
            if self._stands_on(node, frontier - {node}):
                return node
        for node in can_open:
            if not self.is_role(node) or len(frontier) > 5:
                return node
        return None

    def _opened(self, node: fx.Node) -> list[fx.Node] | None:
        """Return the token-wise inputs of a node, none if it has others that are no constant."""
        sources = [each for each in node.all_input_nodes if self.is_local(each)]
        rest = [each for each in node.all_input_nodes if not self.is_local(each)]
        return sources if sources and all(self.is_free(each) for each in rest) else None

    def _stands_on(self, node: fx.Node, others: set[fx.Node]) -> bool:
        seen, todo = {node}, [node]
        while todo:
            for source in todo.pop().all_input_nodes:
                if source in others:
                    return True
                if source not in seen and self.is_local(source):
                    seen.add(source)
                    todo.append(source)
        return False

    def _without_views(self, node: fx.Node) -> fx.Node:
        while node.target in VIEWS:
            source = node.args[0]
            if not isinstance(source, fx.Node) or not self.is_local(source) or _features(source) < _features(node):
                break
            node = source
        return node

    def is_role(self, node: fx.Node) -> bool:
        """Whether a node has as many elements a token as a query, key, value, decay or beta."""
        B, N, _, HV, K, V = self.marked.sizes
        per_token = node.meta["val"].numel() // (B * N)
        return per_token in (HV, HV * V) or (per_token % K == 0 and HV % (per_token // K) == 0)

    def region(self, frontier: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Region | None:
        """Gather what lies between a frontier and the outputs; none if it reads anything else."""
        seen, todo = {self.marked.state_in, *frontier}, [self.marked.final_state, *outputs]
        nodes = []
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            if node.op == "placeholder":
                return None
            seen.add(node)
            nodes.append(node)
            todo += node.all_input_nodes
        nodes.sort(key=self.order.__getitem__)
        return Region(self.marked, self.labels, tuple(frontier), tuple(nodes), tuple(outputs))


def _features(node: fx.Node) -> int:
    """Count the axes of a node that are longer than one."""
    return sum(size > 1 for size in shape_of(node) or ())
