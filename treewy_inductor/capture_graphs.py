"""Write a graph down before and after the backend's passes, and cut out what belongs to one recurrence."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from treewy_inductor import backend, compat, ops, ops_linear, ops_replay, records
from treewy_inductor.passes.marked_state import MarkedState, marked_states
from treewy_inductor.report_graph import GraphNode

SHORT_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}
SHORT_DTYPES |= {torch.int64: "i64", torch.int32: "i32", torch.bool: "b8"}
TREE_OPS = {str(op) for op in (ops.tree_gated_delta, ops_replay.tree_gated_delta_trunk, ops_linear.tree_linear_attention)}


@dataclass(frozen=True)
class Ends:
    """Where one state is in the graph, by name, and what it costs.

    Attributes:
        source: what the marker reads: the cache's own tensor.
        state_in, final_state: the region's first and last node.
        bytes_kept: of one node of one row in the buffers that a commit reads.
        bytes_of_state: of one row's state.
    """

    source: str
    state_in: str
    final_state: str
    bytes_kept: int
    bytes_of_state: int


@dataclass
class CapturedGraph:
    """A graph before and after the passes, nodes by name in the graph's order, and the seconds that the passes took."""

    before: dict[str, GraphNode] = field(default_factory=dict)
    after: dict[str, GraphNode] = field(default_factory=dict)
    ends: dict[tuple[int, int], Ends] = field(default_factory=dict)
    seconds: float = 0.0

    def regions(self, record: records.Proven) -> tuple[tuple[GraphNode, ...], tuple[GraphNode, ...]]:
        """Return what a proven recurrence was, from its roles to its output and last state, and what it became."""
        ends = self.ends[record.layer, record.slot]
        roles = {name for role, name in record.roles.items() if role != "output"}
        role_of = {name: role for role, name in record.roles.items()} | {ends.state_in: "state", ends.source: "state"}
        role_of[ends.final_state] = "final_state"
        before = _between(self.before, {record.roles["output"], ends.final_state}, roles | {ends.state_in})
        after = self._grown(ends.source)
        ops_by_name = {node.name: node.op for node in after}
        for node in after:
            if node.op == "getitem[0]" and node.inputs and ops_by_name[node.inputs[0]] in TREE_OPS:
                role_of[node.name] = "output"
        return (
            tuple(replace(node, role=role_of.get(node.name, "")) for node in before),
            tuple(replace(node, role=role_of.get(node.name, "")) for node in after),
        )

    def refused_region(self, record: records.Refused) -> tuple[GraphNode, ...]:
        """Return what lies between a refused recurrence's states, the refused node marked; nothing if it has none."""
        ends = self.ends.get((record.layer, record.slot))
        if ends is None or record.kind == "causal_conv1d" or record.node not in self.before:
            return ()
        knows_state = {ends.state_in}
        for name, node in self.before.items():
            if knows_state & set(node.inputs):
                knows_state.add(name)
        goals = {ends.final_state, record.node} & knows_state
        inside = {node.name for node in _between(self.before, goals, set(self.before) - knows_state | {ends.state_in})}
        role_of = {ends.state_in: "state", ends.final_state: "final_state", record.node: "refused"}
        shown = [node for name, node in self.before.items() if name in inside]
        return tuple(
            replace(
                node, role=role_of.get(node.name, ""), inputs=node.inputs if node.name in knows_state - {ends.state_in} else ()
            )
            for node in shown
        )

    def _grown(self, state: str) -> list[GraphNode]:
        """Return the new nodes around the op that reads a state, and what they read."""
        new = {name: node for name, node in self.after.items() if name not in self.before}
        found = {name for name, node in new.items() if node.op in TREE_OPS and state in node.inputs}
        while True:
            below = {name for name, node in new.items() if found & set(node.inputs)}
            above = {source for name in found for source in new[name].inputs if source in new}
            if below | above <= found:
                break
            found |= below | above
        shown = found | {source for name in found for source in new[name].inputs}
        return [node if name in found else replace(node, inputs=()) for name, node in self.after.items() if name in shown]


class CapturePass(compat.CustomGraphPass):  # type: ignore[misc]
    """The backend's pass with the graph written down before and after it."""

    def __init__(self) -> None:
        self.captured = CapturedGraph()

    def __call__(self, graph: fx.Graph) -> None:
        self.captured.before = _written_down(graph.nodes)
        for marked in marked_states(graph)[0]:
            kept, state = _bytes_of(marked)
            names = (str(marked.state_in.args[0]), marked.state_in.name, marked.final_state.name)
            self.captured.ends[marked.layer, marked.slot] = Ends(*names, kept, state)
        started = time.perf_counter()
        try:
            backend.TreePass(backend.OWN_OPTIONS | {"outline": False}, None)(graph)
        finally:
            self.captured.seconds = time.perf_counter() - started
            self.captured.after = _written_down(graph.nodes)

    def uuid(self) -> None:
        """Return none: a graph taken from a cache would not be written down."""


def _bytes_of(marked: MarkedState) -> tuple[int, int]:
    state, buffers = marked.state_in.meta["val"], [node.meta["val"] for node in marked.buffers]
    kept = sum(math.prod(buffer.shape[2:]) * buffer.dtype.itemsize for buffer in buffers)
    return kept, math.prod(state.shape[1:]) * state.dtype.itemsize


def _between(nodes: dict[str, GraphNode], ends: set[str], starts: set[str]) -> list[GraphNode]:
    """Return what ``ends`` are computed from, down from ``starts``; a start is shown without what it reads."""
    inside, todo = set(), list(ends)
    while todo:
        name = todo.pop()
        if name not in inside:
            inside.add(name)
            todo += [] if name in starts else nodes[name].inputs
    return [replace(node, inputs=()) if name in starts else node for name, node in nodes.items() if name in inside]


def _written_down(nodes: Iterable[fx.Node]) -> dict[str, GraphNode]:
    written = {}
    for node in nodes:
        if node.op == "output":
            continue
        source, code = records.source_of(node)
        op = "input" if node.op in ("placeholder", "get_attr") else _name_of(node)
        inputs = tuple(each.name for each in node.all_input_nodes)
        written[node.name] = GraphNode(node.name, op, inputs, _shape(node.meta.get("val")), source, code)
    return written


def _name_of(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"getitem[{node.args[1]}]"
    name = str(node.target)
    return getattr(node.target, "__name__", name) if " " in name else name


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return ""
    dtype = SHORT_DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return f"{dtype}[{', '.join(map(str, value.shape))}]"
