"""Run a rewritten convolution beside the model's own along paths of a random tree: a check that shares nothing with the proof.

The proof compares columns in float64. Here both sides run as the graphs have them, in their own dtypes: the new nodes, with
every cast, layout and activation that was repeated, once on the whole tree through its window table; the model's nodes on each
path as an ordinary sequence behind the same history, filled up with tokens that a causal convolution must not see.

    B batch   C channels   N nodes   K kernel and history columns
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from treewy_inductor import compat
from treewy_inductor.encoding import derive
from treewy_inductor.passes.check_on_a_tree import (
    between,
    path_to,
    random_parents,
    some_leaves,
    tolerance_of,
)
from treewy_inductor.passes.evaluate_region import evaluate
from treewy_inductor.passes.follow_columns import Columns, parameters_of
from treewy_inductor.passes.relative_error import relative_error


def check_conv_on_a_tree(
    marker: fx.Node, columns: Mapping[fx.Node, Columns], new: Mapping[fx.Node, fx.Node], order: dict[fx.Node, int]
) -> str:
    """Compare; return what differs, empty if nothing does.

    Args:
        columns: the nodes behind the marker, as they were followed.
        new: what now stands for each node that holds the new tokens' columns alone.
        order: the place of each node in the graph, new ones included.
    """
    with compat.without_fake_tensors():
        return _check(marker, columns, new, order)


def _check(
    marker: fx.Node, columns: Mapping[fx.Node, Columns], new: Mapping[fx.Node, fx.Node], order: dict[fx.Node, int]
) -> str:
    inputs, history, window = (node for node in marker.args[:3] if isinstance(node, fx.Node))
    B, _, N = inputs.meta["val"].shape
    K = history.meta["val"].shape[2]
    parents = random_parents(N)
    given = _drawn([inputs, history, *parameters_of(columns, marker)[0]])
    x, past = given.pop(inputs), given.pop(history)
    links = torch.tensor([parents] * B, dtype=torch.int32, device=x.device)
    on_the_tree = {**given, inputs: x, history: past, window: derive(links, K)[2]}
    ends = list(new.values())
    found = evaluate(between(on_the_tree, ends, order), on_the_tree, ends, widen=False)
    nodes = between({**given, marker: x}, list(new), order)
    for leaf in some_leaves(parents):
        path = path_to(leaf, parents)
        chain = x[:, :, path + [0] * (N - len(path))]
        read = torch.cat([past.to(chain), chain], 2).to(marker.meta["val"].dtype)
        own = evaluate(nodes, {**given, marker: read}, list(new), widen=False)
        for end, node in new.items():
            place = columns[end]
            got, expected = place.new(found[node], K, N)[:, :, path], place.new(own[end], K, N)[:, :, : len(path)]
            error = relative_error(got, expected)
            if not error < tolerance_of(found[node].dtype):
                return f"on a random tree its output at node {leaf} differs from the model's own along the path by {error:.1e}"
    return ""


def _drawn(nodes: list[fx.Node]) -> dict[fx.Node, Tensor]:
    generator = torch.Generator().manual_seed(5)
    values = {node: node.meta["val"] for node in nodes}
    return {node: torch.randn(value.shape, generator=generator).to(value) for node, value in values.items()}
