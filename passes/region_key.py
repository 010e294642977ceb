"""Describe everything a proof may look at around a state, so that equal layers are proven once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from treewy_inductor.passes.marked_state import MarkedState
from treewy_inductor.passes.token_axis import PROJECTIONS, Kind, Label


@dataclass(frozen=True)
class Neighbourhood:
    """The nodes around a state in the graph's order; two with equal keys correspond node by node."""

    key: str
    nodes: tuple[fx.Node, ...]


def neighbourhood(marked: MarkedState, labels: dict[fx.Node, Label], order: dict[fx.Node, int]) -> Neighbourhood:
    """Gather what follows the state up to the next projection, and what all that depends on back to the last one."""
    after, todo = {marked.state_in}, [marked.state_in]
    while todo:
        for user in todo.pop().users:
            ends = user.op == "output" or user is marked.state_out
            if user not in after and not ends and not (user.target in PROJECTIONS and labels[user] is not Kind.MIXED):
                after.add(user)
                todo.append(user)
    inside, todo = set(), [marked.final_state, *after]
    while todo:
        node = todo.pop()
        if node in inside:
            continue
        inside.add(node)
        is_edge = node.op == "placeholder" or node is marked.state_in
        is_edge = is_edge or (labels[node] is Kind.OPAQUE and node not in after) or _is_source(node, labels, after)
        if not is_edge:
            todo += node.all_input_nodes
    nodes = tuple(sorted(inside, key=order.__getitem__))
    place = {node: str(i) for i, node in enumerate(nodes)}
    digest = hashlib.sha256(repr((marked.sizes, place[marked.final_state])).encode())
    digest.update(repr([_described_value(marked.buffer(name)) for name in ("keys", "path_decay")]).encode())
    for node in nodes:
        users_outside = any(user not in place and user is not marked.state_out for user in node.users)
        digest.update(f"{_described(node, place)} {labels[node]} {users_outside}\n".encode())
    return Neighbourhood(digest.hexdigest(), nodes)


def _is_source(node: fx.Node, labels: dict[fx.Node, Label], after: set[fx.Node]) -> bool:
    # A token-wise value made from what is not followed: the way back ends there.
    if node in after or not isinstance(labels[node], int):
        return False
    return any(labels[each] is Kind.OPAQUE for each in node.all_input_nodes)


def _described(node: fx.Node, place: dict[fx.Node, str]) -> str:
    if node.op == "get_attr":
        value: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        content = value.tolist() if isinstance(value, Tensor) else getattr(value, "code", value)
        return f"attribute {content}"
    if node.op == "placeholder":
        return f"input {_described_value(node)}"
    args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: place.get(each, _described_value(each)))
    return f"{node.target} {args} {_described_value(node)}"


def _described_value(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.device}"
    return str(type(value).__name__)
