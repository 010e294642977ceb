"""Follow the columns of ``[history, inputs]`` through what a model does with them, until only the new ones are left.

conv_in [B,C,K+N]  ->  convolution, padding K-1 [B,C,2K+N-1]  ->  slice to K+N  ->  slice(-N) [B,C,N]
index 0 is column 0    index j reads up to column j               the same           index 0 is column K: an end
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from treewy_inductor.passes.propose_region import Unlike
from treewy_inductor.passes.token_axis import shape_of

aten, prims = torch.ops.aten, torch.ops.prims

_SAME = {aten.clone.default, aten.alias.default, aten._to_copy.default, prims.convert_element_type.default}


@dataclass(frozen=True)
class Columns:
    """Index j along ``axis`` holds what was computed from columns up to ``first + j``; ``count`` of them."""

    axis: int
    first: int
    count: int

    def new(self, value: Tensor, history: int, tokens: int) -> Tensor:
        """Return the part of the new tokens, ``[B, C, N]``."""
        return value.narrow(self.axis, history - self.first, tokens).movedim(self.axis, -1).flatten(1, -2)

    def has_new(self, history: int, tokens: int) -> bool:
        """Whether every new token has its index."""
        return self.first <= history and self.first + self.count >= history + tokens


def follow_columns(marker: fx.Node, order: dict[fx.Node, int]) -> tuple[dict[fx.Node, Columns], list[fx.Node]]:
    """Return every node behind ``conv_in`` with its columns, and those that hold just the new tokens'.

    What is behind the new tokens' columns is followed as far as it can be, since a convolution may be written as a sum of
    shifted products of which one reads just those.

    Raises:
        Unlike: history and new tokens together reach an operator through which they cannot be followed.
    """
    history, tokens = marker.args[1].meta["val"].shape[2], marker.args[0].meta["val"].shape[2]  # type: ignore[union-attr]
    found = {marker: Columns(2, 0, history + tokens)}
    ends: list[fx.Node] = []
    todo = set(marker.users)
    while todo:
        # In the graph's order, so that whatever a node reads has been followed before it.
        node = min(todo, key=order.__getitem__)
        todo.remove(node)
        columns = _columns_of(node, found)
        if columns is None and all(source in ends for source in node.all_input_nodes if source in found):
            continue
        if columns is None:
            reason = "the convolution's columns, history and new tokens alike, reach this operator"
            raise Unlike(node, f"{reason}; of its columns only the new tokens' may be taken, as in columns[..., -tokens:]")
        found[node] = columns
        if columns.first == history and columns.count == tokens:
            ends.append(node)
        todo.update(node.users)
    return found, ends


def _columns_of(node: fx.Node, found: dict[fx.Node, Columns]) -> Columns | None:
    target: Any = node.target
    source = node.args[0] if node.args else None
    if node.op != "call_function":
        return None
    if torch.Tag.pointwise in getattr(target, "tags", ()) or target in _SAME:
        return _merged([each for each in node.all_input_nodes if each in found], node, found)
    if not isinstance(source, fx.Node) or source not in found:
        return None
    columns, shape, args = found[source], shape_of(source), list[Any](node.args)
    assert shape is not None
    if target is aten.slice.Tensor:
        dim, start, end, step = (args[i] if len(args) > i else None for i in range(1, 5))
        first, last, _ = slice(start, end, step or 1).indices(columns.count)
        if int(dim or 0) % len(shape) != columns.axis:
            return None
        return Columns(columns.axis, columns.first + first, last - first) if step in (None, 1) else None
    if target is aten.convolution.default:
        return _after_convolution(node, columns)
    if target is aten.permute.default:
        return Columns([int(d) % len(shape) for d in args[1]].index(columns.axis), columns.first, columns.count)
    if target is aten.transpose.int:
        a, b = (int(d) % len(shape) for d in args[1:3])
        axis = b if columns.axis == a else a if columns.axis == b else columns.axis
        return Columns(axis, columns.first, columns.count)
    return None


def _merged(sources: list[fx.Node], node: fx.Node, found: dict[fx.Node, Columns]) -> Columns | None:
    shape = shape_of(node)
    if shape is None:
        return None
    axes = {found[each].axis - len(shape_of(each) or ()) for each in sources}
    counts = {found[each].count for each in sources}
    if len(axes) != 1 or len(counts) != 1:
        return None
    axis = axes.pop() + len(shape)
    for each in node.all_input_nodes:
        own = shape_of(each) or ()
        aligned = axis - len(shape) + len(own)
        # What varies along the columns and is not made of them would give each column its place in the list.
        if each not in found and aligned >= 0 and own and own[aligned] != 1:
            return None
    return Columns(axis, max(found[each].first for each in sources), counts.pop())


def _after_convolution(node: fx.Node, columns: Columns) -> Columns | None:
    _, weight, _, stride, padding, dilation, transposed, _, groups = list[Any](node.args)
    shape = shape_of(weight)
    if shape is None or len(shape) != 3 or columns.axis != 2 or transposed:
        return None
    if list(stride) != [1] or list(dilation) != [1] or groups != shape[0] or shape[1] != 1:
        return None
    pad = int(padding[0])
    kernel = shape[2]
    return Columns(2, columns.first + kernel - 1 - pad, columns.count + 2 * pad - kernel + 1)


def parameters_of(columns: Iterable[fx.Node], marker: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the inputs of the graph on which nodes depend beside the marker, and all nodes between."""
    inputs: list[fx.Node] = []
    between, todo = {marker}, [node for node in columns if node is not marker]
    while todo:
        node = todo.pop()
        if node in between:
            continue
        between.add(node)
        if node.op == "placeholder":
            inputs.append(node)
            continue
        todo += node.all_input_nodes
    return inputs, [node for node in between if node not in inputs and node is not marker]
