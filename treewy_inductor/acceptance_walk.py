"""Follow a verified tree from its root down, deciding one position at a time.

At each level a rule looks at the target's scores after the current node and decides the token of the next position. If a
child holds that token the walk goes on there, otherwise the token is the bonus that ends it. Three rules:

    take_best       the most likely token                               greedy decoding with logits processors
    match_sample    a token sampled from the target                     lossless for trees that were not drawn
    reject_drafts   recursive rejection without replacement             lossless for trees that were drawn

Only visited nodes are looked at, so what a rejected node holds or scores changes nothing. Nothing waits for the device.

    B rows   N nodes   V vocabulary   D levels of the deepest tree
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treewy_inductor.sampling import Randomness

Rule = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Walk:
    """Where a walk led.

    Args:
        path: ``[B, N]`` int32, accepted nodes from the root down, then -1; all -1 in a row without nodes.
        emitted: ``[B, D]`` int64, the token decided at each accepted node (the last one is the bonus), then -1.
        count: ``[B]`` int64, accepted nodes, which is also the number of tokens emitted.
        scores: per level the ``[B, V]`` scores that decided it.
    """

    path: Tensor
    emitted: Tensor
    count: Tensor
    scores: list[Tensor]


def walk_tree(tokens: Tensor, parents: Tensor, levels: int, score: Callable[[Tensor, Tensor, int], Tensor], rule: Rule) -> Walk:
    """Return the walk that ``rule`` makes from node 0 of every row.

    Args:
        tokens: ``[B, N]`` int64.
        parents: ``[B, N]`` int32, -1 at a root, -2 at an inert node; a row whose node 0 is inert is not walked.
        levels: D, at least the levels of the deepest tree.
        score: ``(node [B], emitted [B, level], level) -> scores [B, V]``, the target's scores after each row's node; a row
            that has stopped passes a node of its own anyway and its scores are not used.
        rule: ``(scores [B, V], node [B], level) -> (token [B], child [B])``, child -1 where the walk ends.
    """
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    node = torch.zeros_like(rows)
    is_walking = parents[:, 0] == -1
    path = torch.full_like(parents, -1)
    emitted: list[Tensor] = []
    seen: list[Tensor] = []
    for level in range(levels):
        path[:, level] = torch.where(is_walking, node.int(), -1)
        # A row that has stopped emits no tokens, and processors would look -1 up.
        scores = score(node, torch.stack(emitted, 1).clamp(min=0) if emitted else tokens[:, :0], level)
        token, child = rule(scores, node, level)
        emitted.append(torch.where(is_walking, token, -1))
        seen.append(scores)
        is_walking = is_walking & (child >= 0)
        node = torch.where(is_walking, child, node)
    return Walk(path, torch.stack(emitted, 1), (path >= 0).sum(1), seen)


def child_holding(token: Tensor, node: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
    """Return the first child of ``node`` ``[B]`` that holds ``token`` ``[B]``, or -1."""
    holds = (parents == node[:, None]) & (tokens == token[:, None])
    return torch.where(holds.any(1), holds.int().argmax(1), -1)


def take_best(tokens: Tensor, parents: Tensor) -> Rule:
    """Return the rule of greedy decoding."""

    def rule(scores: Tensor, node: Tensor, level: int) -> tuple[Tensor, Tensor]:
        token = scores.argmax(-1)
        return token, child_holding(token, node, tokens, parents)

    return rule


def match_sample(tokens: Tensor, parents: Tensor, randomness: Randomness) -> Rule:
    """Return the rule that samples from the target and then looks whether a child holds that very token.

    The emitted tokens are plain samples: the tree decides how many come in one step, never which.
    """

    def rule(scores: Tensor, node: Tensor, level: int) -> tuple[Tensor, Tensor]:
        token = randomness.choose(scores.double().softmax(-1), level)
        return token, child_holding(token, node, tokens, parents)

    return rule


def reject_drafts(tokens: Tensor, parents: Tensor, probabilities: Tensor, siblings: int, randomness: Randomness) -> Rule:
    """Return the rule that accepts drawn drafts as often as the target allows.

    With ``p`` the target and ``q`` the drafter's distribution, the children x of a node are tried in the order in which
    they were drawn: x is accepted with probability ``min(1, p(x) / q(x))``; if it is not, ``p`` becomes what is left,
    ``max(p - q, 0)`` normalised, and ``q`` loses x, as it did for the next draw. When all are rejected the token is drawn
    from the ``p`` left over. One child a node is the chain rule of speculative sampling.

    Args:
        probabilities: ``[B, N, V]``, row t the distribution from which the children of node t were drawn.
        siblings: the most children that any node has.

    Source: Leviathan, Kalman, Matias 2023 (chains); Jeon et al., Recursive speculative decoding, 2024 (without replacement).
    """
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    before = torch.ones(parents.shape[1], parents.shape[1], dtype=torch.bool, device=parents.device).tril(-1)
    rank = ((parents[:, None, :] == parents[:, :, None]) & before).sum(-1)  # [B, N], 0 for a first child

    def rule(scores: Tensor, node: Tensor, level: int) -> tuple[Tensor, Tensor]:
        p = scores.double().softmax(-1)
        q = probabilities[rows, node].double()
        q = q / q.sum(-1, keepdim=True)
        accepted = torch.full_like(node, -1)
        for order in range(siblings):
            is_tried = (parents == node[:, None]) & (rank == order)
            child = is_tried.int().argmax(1)
            x = tokens.gather(1, child[:, None])
            ratio = (p.gather(1, x) / q.gather(1, x))[:, 0].clamp(max=1)
            is_open = is_tried.any(1) & (accepted < 0)
            is_accepted = is_open & randomness.accept(ratio, level, order)
            accepted = torch.where(is_accepted, child, accepted)
            is_rejected = (is_open & ~is_accepted)[:, None]
            left = (p - q).clamp(min=0)
            # Nothing is left only where p equals q, and there a rejection has probability 0.
            is_left = left.sum(-1, keepdim=True) > 0
            p = torch.where(is_rejected & is_left, left / left.sum(-1, keepdim=True), p)
            q_left = q.scatter(1, x, 0)
            q = torch.where(is_rejected, q_left / q_left.sum(-1, keepdim=True), q)
        bonus = randomness.choose(p, level)
        held = tokens.gather(1, accepted.clamp(min=0)[:, None])[:, 0]
        return torch.where(accepted >= 0, held, bonus), accepted

    return rule


def by_row(is_first: Tensor, first: Rule, second: Rule) -> Rule:
    """Return the rule that follows ``first`` in the rows where ``is_first`` ``[B]`` holds and ``second`` elsewhere."""

    def rule(scores: Tensor, node: Tensor, level: int) -> tuple[Tensor, Tensor]:
        (token, child), (other_token, other_child) = first(scores, node, level), second(scores, node, level)
        return torch.where(is_first, token, other_token), torch.where(is_first, child, other_child)

    return rule
