"""Describe everything a proof may look at around a state, so that equal layers are proven once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from treewy_inductor.passes.marked_state import MarkedState
from treewy_inductor.passes.token_axis import PROJECTIONS, Kind, Label


@dataclass(frozen=True)
class Neighbourhood:
    """The nodes around a state, each after its inputs; two with equal keys correspond node by node."""

    key: str
    nodes: tuple[fx.Node, ...]


def neighbourhood(marked: MarkedState, labels: dict[fx.Node, Label], order: dict[fx.Node, int]) -> Neighbourhood:
    """Gather what follows the state up to the next projection, and what all that depends on back to the last one."""
    after, todo = {marked.state_in}, [marked.state_in]
    while todo:
        for user in todo.pop().users:
            ends = user.op == "output" or user is marked.state_out or user not in order
            if user not in after and not ends and not (user.target in PROJECTIONS and labels[user] is not Kind.MIXED):
                after.add(user)
                todo.append(user)

    def is_edge(node: fx.Node) -> bool:
        if node.op == "placeholder" or getattr(node.target, "namespace", "") == "treewy":
            return True
        return node not in after and (labels[node] is Kind.OPAQUE or _is_source(node, labels))

    nodes = nodes_before([marked.final_state, *sorted(after, key=order.__getitem__)], is_edge)
    digest = hashlib.sha256(repr(marked.sizes).encode())
    digest.update(repr([_described_value(node) for node in marked.buffers]).encode())
    inside = set(nodes)
    for node in nodes:
        leaves = any(user in order and user not in inside and user is not marked.state_out for user in node.users)
        digest.update(f"{labels[node]} {leaves}".encode())
    digest.update(description(nodes, is_edge).encode())
    return Neighbourhood(digest.hexdigest(), nodes)


def nodes_before(roots: Sequence[fx.Node], is_edge: Callable[[fx.Node], bool]) -> tuple[fx.Node, ...]:
    """Return what the roots depend on back to edges, each node after its inputs, in an order that the roots alone decide."""
    found: dict[fx.Node, None] = {}
    for root in roots:
        todo = [root]
        while todo:
            node = todo[-1]
            rest = [] if is_edge(node) else [each for each in node.all_input_nodes if each not in found]
            if rest:
                todo.append(rest[0])
                continue
            found[todo.pop()] = None
    return tuple(found)


def description(nodes: Sequence[fx.Node], is_edge: Callable[[fx.Node], bool]) -> str:
    """Write out what nodes compute, so that equal descriptions compute the same of inputs of the same shapes."""
    place = {node: f"%{i}" for i, node in enumerate(nodes)}
    return "\n".join(_described_value(node) if is_edge(node) else _described(node, place) for node in nodes)


def _is_source(node: fx.Node, labels: dict[fx.Node, Label]) -> bool:
    # A token-wise value made from what is not followed: the way back ends there.
    return isinstance(labels[node], int) and any(labels[each] is Kind.OPAQUE for each in node.all_input_nodes)


def _described(node: fx.Node, place: dict[fx.Node, str]) -> str:
    if node.op == "get_attr":
        value: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        content = value.tolist() if isinstance(value, Tensor) else getattr(value, "code", value)
        return f"attribute {content}"
    args = fx.node.map_arg((node.args, dict(node.kwargs)), place.__getitem__)
    return f"{node.target} {args} {_described_value(node)}"


def _described_value(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.device}"
    return str(type(value).__name__)
