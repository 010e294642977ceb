"""Find where a graph rounds to half precision, which a proof in float64 cannot see."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import Tensor, fx

from treewy_inductor.passes.propose_region import VIEWS

aten, prims = torch.ops.aten, torch.ops.prims

HALF = (torch.float16, torch.bfloat16)
MOVES = VIEWS | {
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.cat.default,
    aten.stack.default,
    aten.constant_pad_nd.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.copy.default,
    aten.full.default,
    aten.zeros.default,
    aten.empty.memory_format,
    operator.getitem,
}
CASTS = {prims.convert_element_type.default, aten._to_copy.default}


def rounds(node: fx.Node) -> bool:
    """Whether a node's own operation rounds to half precision: arithmetic in it, or a cast down to it."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype not in HALF or node.op != "call_function" or node.target in MOVES:
        return False
    if node.target in CASTS:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return bool(source.meta["val"].dtype != value.dtype)
    return True


def rounding_before(ends: Iterable[fx.Node], nodes: Iterable[fx.Node], allowed: Iterable[fx.Node]) -> fx.Node | None:
    """Return a node among ``nodes`` that rounds on the way to ``ends``, none if nothing but ``allowed`` does."""
    inside, may = set(nodes), set(allowed)
    seen, todo = set(), list(ends)
    while todo:
        node = todo.pop()
        if node in seen or node not in inside:
            continue
        seen.add(node)
        if rounds(node) and node not in may:
            return node
        todo += node.all_input_nodes
    return None
