"""Grow draft trees from a model's predictions, one call of the model per level for all rows together.

With widths, node t of level i gets the ``widths[i]`` most probable tokens as children, or as many drawn without replacement
when the target samples. With a node budget the tree is the set of nodes of highest path probability: a child is never more
probable than its parent, so it is enough to keep the best ``node_budget`` candidates of every level and to choose among all
levels at the end.

    F nodes of a level's frontier   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treewy_inductor.drafting import Draft, DraftRequest
from treewy_inductor.sampling import draw_without_replacement
from treewy_inductor.tree import ROOT, DraftTree


@dataclass(frozen=True)
class FrontierNode:
    """A node whose children are asked for.

    Args:
        entry: index into the request's rows.
        node: its number in the row's growing tree, 0 at the root; it never changes while the tree grows.
        parent: its parent's number, -1 at the root.
    """

    entry: int
    node: int
    parent: int
    token: int
    depth: int


@dataclass
class _Growing:
    parents: list[int]
    tokens: list[int]
    log_probabilities: list[float] = field(default_factory=lambda: [0.0])
    distributions: dict[int, Tensor] = field(default_factory=dict)

    def add(self, parent: int, token: int, log_probability: float) -> int:
        self.parents.append(parent)
        self.tokens.append(token)
        self.log_probabilities.append(log_probability)
        return len(self.parents) - 1


def grow_trees(
    request: DraftRequest,
    extend: Callable[[list[FrontierNode]], Tensor],
    *,
    max_depth: int | None = None,
    sample: bool | None = None,
) -> list[Draft]:
    """Return one draft per row of ``request``, its tokens predicted by ``extend``.

    Args:
        extend: given the nodes of one level, returns the logits ``[F, V]`` of the token after each. Not asked for the deepest
            level. It may keep what it computed for a node under ``(entry, node)``, since later levels name it as parent.
        max_depth: the deepest level below the root under a node budget; 8 if not given. Widths bring their own depth.
        sample: whether children are drawn; by default they are if the request samples and gives widths.
    """
    sample = (request.sampling is not None and request.widths is not None) if sample is None else sample
    if request.widths is None and request.node_budget is None:
        raise ValueError("the request has neither widths nor a node budget: pass draft_tree_widths or draft_node_budget")
    trees = [_Growing([ROOT], [tokens[-1]]) for tokens in request.tokens]
    depth = len(request.widths) if request.widths is not None else max_depth or 8
    frontier = [FrontierNode(entry, 0, ROOT, tree.tokens[0], 0) for entry, tree in enumerate(trees)]
    for level in range(depth):
        frontier = [node for node in frontier if request.room[node.entry] > level + 1]
        if not frontier:
            break
        logits = extend(frontier)
        if request.widths is None:
            frontier = _extend_best(trees, frontier, logits, request.node_budget or 1)
        elif sample:
            frontier = _extend_drawn(trees, frontier, logits, request, request.widths[level])
        else:
            frontier = _extend_widest(trees, frontier, logits, request.widths[level], request.max_nodes)
    return [_finished(tree, request) for tree in trees]


def _best_tokens(logits: Tensor, width: int) -> tuple[list[list[int]], list[list[float]]]:
    values, tokens = logits.float().log_softmax(-1).topk(min(width, logits.shape[-1]), dim=-1)
    return tokens.tolist(), values.tolist()


def _extend_widest(
    trees: list[_Growing], frontier: list[FrontierNode], logits: Tensor, width: int, max_nodes: int
) -> list[FrontierNode]:
    grown = []
    for node, tokens, values in zip(frontier, *_best_tokens(logits, width), strict=True):
        tree = trees[node.entry]
        for token, value in zip(tokens, values, strict=True):
            if len(tree.parents) < max_nodes:
                number = tree.add(node.node, token, tree.log_probabilities[node.node] + value)
                grown.append(FrontierNode(node.entry, number, node.node, token, node.depth + 1))
    return grown


def _extend_drawn(
    trees: list[_Growing], frontier: list[FrontierNode], logits: Tensor, request: DraftRequest, width: int
) -> list[FrontierNode]:
    assert request.sampling is not None
    probabilities = request.sampling.probabilities(logits)
    entries = [node.entry for node in frontier for _ in range(width)]
    draws = [node.node * width + order for node in frontier for order in range(width)]
    u = request.sampling.uniforms(entries, [(frontier[0].depth + 1) * 2**16 + draw for draw in draws])
    drawn = draw_without_replacement(probabilities, u.view(len(frontier), width)).tolist()
    # How many children a node gets must not depend on which tokens were drawn, or the draws would be biased.
    room = [request.max_nodes - len(tree.parents) for tree in trees]
    grown = []
    for node, distribution, tokens in zip(frontier, probabilities, drawn, strict=True):
        tree = trees[node.entry]
        tree.distributions[node.node] = distribution
        quota = max(0, min(width, room[node.entry]))
        room[node.entry] -= quota
        for token in tokens[:quota]:
            if token >= 0:
                number = tree.add(node.node, token, 0.0)
                grown.append(FrontierNode(node.entry, number, node.node, token, node.depth + 1))
    return grown


def _extend_best(trees: list[_Growing], frontier: list[FrontierNode], logits: Tensor, budget: int) -> list[FrontierNode]:
    candidates: list[list[tuple[float, FrontierNode, int]]] = [[] for _ in trees]
    for node, tokens, values in zip(frontier, *_best_tokens(logits, budget - 1), strict=True):
        above = trees[node.entry].log_probabilities[node.node]
        candidates[node.entry] += [(above + value, node, token) for token, value in zip(tokens, values, strict=True)]
    grown = []
    for tree, found in zip(trees, candidates, strict=True):
        found.sort(key=lambda candidate: -candidate[0])
        for log_probability, node, token in found[: budget - 1]:
            # A level only keeps what may still be among the best of all levels.
            if log_probability > _threshold(tree, budget):
                number = tree.add(node.node, token, log_probability)
                grown.append(FrontierNode(node.entry, number, node.node, token, node.depth + 1))
    return grown


def _threshold(tree: _Growing, budget: int) -> float:
    return sorted(tree.log_probabilities, reverse=True)[budget - 1] if len(tree.parents) >= budget else -math.inf


def _finished(tree: _Growing, request: DraftRequest) -> Draft:
    """Return the draft: under a budget the best nodes alone, renumbered in the order in which they were added."""
    if request.widths is None:
        budget = min(request.node_budget or 1, request.max_nodes)
        best = sorted(range(len(tree.parents)), key=lambda t: -tree.log_probabilities[t])[:budget]
        return Draft(_kept(tree, sorted(best)))
    if not tree.distributions:
        return Draft(DraftTree(tree.parents, tree.tokens))
    like = next(iter(tree.distributions.values()))
    nothing = torch.zeros_like(like)
    rows = [tree.distributions.get(t, nothing) for t in range(len(tree.parents))]
    return Draft(DraftTree(tree.parents, tree.tokens), torch.stack(rows))


def _kept(tree: _Growing, nodes: Sequence[int]) -> DraftTree:
    number = {ROOT: ROOT} | {t: i for i, t in enumerate(nodes)}
    return DraftTree([number[tree.parents[t]] for t in nodes], [tree.tokens[t] for t in nodes])
