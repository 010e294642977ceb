"""Say for each node of a graph along which axis its tokens lie, and whether it mixed them.

    [B,N,D] hidden -> linear -> view [B,N,H,K] -> permute [B,H,N,K] -> cumsum over tokens
            axis 1    axis 1             axis 1                axis 2    MIXED

What computes each token from itself alone can be cut anywhere: the recurrence begins where tokens first meet. The labels
only propose where to cut; the proof decides. An operator that is not known here counts as mixing, which moves the cut
towards the inputs and never hides a mixture.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten, prims = torch.ops.aten, torch.ops.prims


class Kind(enum.Enum):
    """What a node is that has no token axis."""

    CONSTANT = "no token reaches it"
    INDEX = "a count of positions, which a tree does not have"
    OPAQUE = "made of tokens in a way that is not followed"
    MIXED = "one token of it depends on another"


Label = Kind | int

PROJECTIONS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_OPAQUE = {aten.convolution.default, aten.embedding.default}
_SAME = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten._to_copy.default,
    aten.lift_fresh_copy.default,
    prims.convert_element_type.default,
    prims.device_put.default,
}
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_REDUCTIONS = {
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.prod.dim_int,
    aten.logsumexp.default,
    aten.linalg_vector_norm.default,
    aten.any.dim,
}
_ALONG_ONE = {aten._softmax.default, aten._log_softmax.default, aten.cumsum.default, aten.cumprod.default, aten.sort.default}
_SPLITS = {aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int, aten.chunk.default}
_INDEX = {aten.arange.default, aten.arange.start, aten.arange.start_step, prims.iota.default}


def label_tokens(graph: fx.Graph, batch: int, tokens: int) -> dict[fx.Node, Label]:
    """Label every node of a graph whose token axes have ``tokens`` entries and whose batch axis comes first."""
    labels: dict[fx.Node, Label] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        label: Label = Kind.CONSTANT
        if node.op == "call_function":
            label = _label_call(node, labels, tokens)
        if label is Kind.OPAQUE or node.op == "placeholder":
            axis = _axis_of_source(node, batch, tokens)
            label = label if axis is None else axis
        labels[node] = label
    return labels


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """Return the shape of a node's value, none if it is no tensor."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _axis_of_source(node: fx.Node, batch: int, tokens: int) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 3 or value.shape[0] != batch:
        return None
    if value.dim() > 3 and value.numel() == tokens:
        # A weight a head, [1, 1, H, 1], of as many heads as there are tokens in a batch of one.
        return None
    return next((axis for axis in range(1, value.dim()) if value.shape[axis] == tokens), None)


def _label_call(node: fx.Node, labels: dict[fx.Node, Label], tokens: int) -> Label:
    target = node.target
    if target in _INDEX:
        return Kind.INDEX
    inputs = [labels[each] for each in node.all_input_nodes]
    if target in _OPAQUE or getattr(target, "namespace", "") == "treewy" or "scaled_dot_product" in str(target):
        return Kind.OPAQUE
    if target in PROJECTIONS:
        return Kind.OPAQUE if Kind.CONSTANT in inputs else Kind.MIXED
    if Kind.MIXED in inputs:
        return Kind.MIXED
    axes = [(each, labels[each]) for each in node.all_input_nodes if isinstance(labels[each], int)]
    if not axes:
        for kind in (Kind.OPAQUE, Kind.INDEX):
            if kind in inputs:
                return kind
        return Kind.CONSTANT
    axis = _axis_after(node, labels, tokens)
    return Kind.MIXED if axis is None else axis


def _axis_after(node: fx.Node, labels: dict[fx.Node, Label], tokens: int) -> int | None:
    """Return the token axis of a node some of whose inputs have one, none if it mixes tokens or is not known."""
    target: Any = node.target
    source = node.args[0] if node.args else None
    if torch.Tag.pointwise in getattr(target, "tags", ()) or target in _SAME or target is aten.where.self:
        return _aligned_axis(node, node.all_input_nodes, labels, tokens)
    if target is aten.cat.default:
        return _axis_after_cat(node, labels)
    if not isinstance(source, fx.Node) or not isinstance(labels[source], int):
        return None
    label, shape, rest = labels[source], shape_of(source), list[Any](node.args[1:])
    assert isinstance(label, int)
    axis = label
    if getattr(target, "__name__", "") == "getitem":
        unbound = source.target is aten.unbind.int and _dim(source, 1, 0) < axis
        return axis - 1 if unbound else axis
    assert shape is not None
    rank = len(shape)
    if target in _VIEWS:
        return _axis_after_view(shape, axis, shape_of(node))
    if target is aten.permute.default:
        return [int(d) % rank for d in rest[0]].index(axis)
    if target is aten.transpose.int:
        a, b = (int(d) % rank for d in rest[:2])
        return b if axis == a else a if axis == b else axis
    if target is aten.expand.default:
        return axis + len(shape_of(node) or ()) - rank
    if target is aten.unsqueeze.default:
        return axis + (int(rest[0]) % (rank + 1) <= axis)
    if target in (aten.squeeze.dim, aten.squeeze.dims):
        dims = _dims(rest[0], rank)
        return axis - sum(d < axis and shape[d] == 1 for d in dims)
    if target is aten.select.int:
        dim = int(rest[0]) % rank
        return None if dim == axis else axis - (dim < axis)
    if target is aten.slice.Tensor:
        return axis if _dim(node, 1, 0) != axis or shape_of(node) == shape else None
    if target in _SPLITS:
        return axis if _dim(node, 2 if target is not aten.unbind.int else 1, 0) != axis else None
    if target in _REDUCTIONS:
        return _axis_after_reduction(node, axis, rank)
    if target in _ALONG_ONE:
        return axis if int(rest[0]) % rank != axis else None
    if target is aten.constant_pad_nd.default:
        pads = list(rest[0])
        first = 2 * (rank - 1 - axis)
        return axis if not any(pads[first : first + 2]) else None
    return None


def _aligned_axis(node: fx.Node, inputs: Iterable[fx.Node], labels: dict[fx.Node, Label], tokens: int) -> int | None:
    shape = shape_of(node)
    if shape is None:
        return None
    found: set[int] = set()
    for each in inputs:
        label, own = labels[each], shape_of(each)
        if own is None:
            return None
        if isinstance(label, int):
            found.add(label + len(shape) - len(own))
    if len(found) != 1:
        return None
    (axis,) = found
    if shape[axis] != tokens:
        return None
    for each in inputs:
        own = shape_of(each) or ()
        aligned = axis - len(shape) + len(own)
        varies = aligned >= 0 and own[aligned] != 1
        # A count of positions would give each node its place in the list, not on its path.
        if varies and labels[each] in (Kind.INDEX, Kind.OPAQUE):
            return None
    return axis


def _axis_after_cat(node: fx.Node, labels: dict[fx.Node, Label]) -> int | None:
    parts: Any = node.args[0]
    axes = {labels[each] for each in parts}
    (axis,) = axes if len(axes) == 1 else (None,)
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    if not isinstance(axis, int) or int(dim) % len(shape_of(parts[0]) or (1,)) == axis:
        return None
    return axis


def _axis_after_view(before: tuple[int, ...], axis: int, after: tuple[int, ...] | None) -> int | None:
    # The axis stays if as many elements come before it as did, and it kept its size.
    assert after is not None
    for place, size in enumerate(after):
        if size == before[axis] and math.prod(after[:place]) == math.prod(before[:axis]):
            return place
    return None


def _axis_after_reduction(node: fx.Node, axis: int, rank: int) -> int | None:
    args: Sequence[Any] = node.args
    place = 2 if node.target is aten.linalg_vector_norm.default else 1
    dims = args[place] if len(args) > place else None
    reduced = _dims(dims, rank) if dims else list(range(rank))
    if axis in reduced:
        return None
    keeps = bool(args[place + 1]) if len(args) > place + 1 else bool(node.kwargs.get("keepdim", False))
    return axis if keeps else axis - sum(d < axis for d in reduced)


def _dims(dims: Any, rank: int) -> list[int]:
    return [int(d) % rank for d in (dims if isinstance(dims, list | tuple) else [dims])]


def _dim(node: fx.Node, place: int, default: int) -> int:
    dim: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)
    source: Any = node.args[0]
    return int(dim) % len(shape_of(source) or (1,))
