"""Prove which node behind a ``conv_in`` marker is the causal convolution, and that what follows it treats each column alone.

All nodes are run in float64 on random columns; the first that equals the literal sum with some weight and bias of the graph is
the convolution. What it is called, and how it is spelled, does not matter. Behind it all columns but the new ones are filled
with NaN: the new tokens' results must not change.

    B batch   C channels   N nodes   K kernel and history columns
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from treewy_inductor.passes.evaluate_region import evaluate
from treewy_inductor.passes.follow_columns import Columns, parameters_of
from treewy_inductor.passes.propose_region import Unlike
from treewy_inductor.passes.relative_error import relative_error

AGREES = 1e-9


@dataclass(frozen=True)
class Convolution:
    """A proven convolution: the node that is the plain sum, its weight ``[C,K]`` and bias ``[C]``, and where it is used."""

    node: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    ends: tuple[fx.Node, ...]
    error: float
    runner_up: float


def prove_causal_conv(
    marker: fx.Node, columns: dict[fx.Node, Columns], new: list[fx.Node], order: dict[fx.Node, int]
) -> Convolution:
    """Find the first node that equals the literal convolution with some weight; check that what follows is columnwise."""
    (_, C, N), K = value_of(marker, 0).shape, value_of(marker, 1).shape[2]
    inputs, nodes = parameters_of(columns, marker)
    nodes.sort(key=order.__getitem__)
    draw = _draw((marker, *inputs))
    values = evaluate(nodes, draw, columns)
    weights = [node for node in inputs if node.meta["val"].numel() == C * K]
    biases = [None, *(node for node in inputs if node.meta["val"].numel() == C)]
    closest, closest_error = marker, float("inf")
    for node, column in columns.items():
        if node is marker or not column.has_new(K, N):
            continue
        got = column.new(values[node], K, N)
        for weight, bias in itertools.product(weights, biases):
            taps, shift = draw[weight].reshape(C, K), None if bias is None else draw[bias].reshape(C)
            error = relative_error(got, _literal(draw[marker], taps, shift))
            if error < AGREES:
                wrong = [relative_error(got, _literal(draw[marker], each, shift)) for each in (taps.flip(1), taps.roll(1, 1))]
                runner_up = min(wrong) if K > 1 else float("inf")
                ends = _ends_behind(node, columns, new)
                _check_columnwise(node, column, ends, (K, N), nodes, draw, values)
                return Convolution(node, weight, bias, tuple(ends), error, runner_up)
            if error < closest_error:
                closest, closest_error = node, error
    reason = f"no node is a causal convolution of {C} channels with {K} taps; the closest is off by {closest_error:.1e}"
    raise Unlike(closest, reason)


def _draw(nodes: tuple[fx.Node, ...]) -> dict[fx.Node, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = {node: node.meta["val"] for node in nodes}
    return {
        node: torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
        for node, value in values.items()
    }


def _literal(columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``y[t] = bias + sum over j of weight[j] columns[t + 1 + j]``, ``[B, C, N]`` of ``[B, C, K+N]``."""
    K = weight.shape[1]
    N = columns.shape[2] - K
    y = columns.new_zeros(*columns.shape[:2], N) if bias is None else bias[:, None].expand(*columns.shape[:2], N)
    for j in range(K):
        y = y + weight[:, j, None] * columns[:, :, 1 + j : 1 + j + N]
    return y


def _ends_behind(node: fx.Node, columns: dict[fx.Node, Columns], new: list[fx.Node]) -> list[fx.Node]:
    """Return where the new tokens' columns first stand alone behind the convolution; refuse if anything goes around it."""
    behind = {each for each in columns if follows(each, node, columns)}
    ends = [
        each
        for each in new
        if each in behind and not any(follows(each, end, columns) for end in new if end is not each and end in behind)
    ]
    if not ends:
        raise Unlike(node, "the new tokens' columns are never taken from the convolution's")
    for each in columns:
        if each not in behind and not all(user in columns for user in each.users):
            raise Unlike(each, "the columns are also read beside the convolution")
    return ends


def follows(node: fx.Node, earlier: fx.Node, columns: dict[fx.Node, Columns]) -> bool:
    """Return whether ``node`` reads ``earlier``, by way of ``columns`` alone."""
    seen, todo = {node}, [node]
    while todo:
        each = todo.pop()
        if each is earlier:
            return True
        for source in each.all_input_nodes:
            if source not in seen and source in columns:
                seen.add(source)
                todo.append(source)
    return False


def _check_columnwise(
    node: fx.Node,
    column: Columns,
    ends: list[fx.Node],
    sizes: tuple[int, int],
    nodes: list[fx.Node],
    draw: dict[fx.Node, Tensor],
    values: dict[fx.Node, Tensor],
) -> None:
    """Refuse if the new tokens' columns behind the convolution read anything but their own."""
    K, N = sizes
    spoiled = torch.full_like(values[node], torch.nan)
    kept = spoiled.narrow(column.axis, K - column.first, N)
    kept.copy_(values[node].narrow(column.axis, K - column.first, N))
    again = evaluate(nodes, {**draw, node: spoiled}, ends)
    for end in ends:
        if not torch.equal(again[end], values[end]):
            raise Unlike(end, "the new tokens' columns behind the convolution depend on other columns")


def value_of(node: fx.Node, place: int) -> Tensor:
    """Return the fake tensor of an operand."""
    value: Tensor = node.args[place].meta["val"]  # type: ignore[union-attr]
    return value
