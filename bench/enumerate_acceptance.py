"""Run the acceptance rules through every random decision they can take, and add up what comes out.

The rules of :mod:`treewy_inductor.acceptance_walk` ask a Randomness for tokens and for yes or no. Here it answers from a
script, a different one in every batch row, and multiplies up how probable the scripted answers were. So the rules themselves
run, on all outcomes at once, and the distribution of the text they emit is known exactly. What a step leaves open of the
next ``levels`` tokens is continued by the target itself, as the next steps would.

    V vocabulary   D levels of the tree   B scripts x draws of the tree
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from treewy_inductor.acceptance_walk import Rule, Walk, match_sample, reject_drafts, walk_tree
from treewy_inductor.tree import DraftTree


class RandomTexts:
    """A distribution over texts: after every context of up to ``levels - 1`` tokens a random one over the vocabulary.

    Args:
        sparsity: share of probabilities that are exactly 0, as after top-k.
        support: tokens that always stay, so that a node can get that many children.
    """

    def __init__(
        self, vocabulary: int, levels: int, generator: torch.Generator, sparsity: float = 0.3, support: int = 1
    ) -> None:
        self.vocabulary = vocabulary
        self.after: list[Tensor] = []
        for level in range(levels):
            weights = torch.rand(vocabulary**level, vocabulary, dtype=torch.float64, generator=generator) ** 3
            keep = torch.rand(weights.shape, dtype=torch.float64, generator=generator) >= sparsity
            keep |= weights >= weights.topk(support, dim=1).values[:, -1:]
            weights = torch.where(keep, weights + 1e-3, 0)
            self.after.append(weights / weights.sum(1, keepdim=True))

    def of_texts(self) -> Tensor:
        """Return ``[V ** levels]``, the probability of every text of ``levels`` tokens, numbered in base V."""
        texts = torch.ones(1, dtype=torch.float64)
        for table in self.after:
            texts = (texts[:, None] * table).reshape(-1)
        return texts


class ScriptedRandomness:
    """Answers row b from ``scripts[b]``: the sampled token of each level, and per level how many drafts are rejected.

    Args:
        tokens: ``[B, D]`` int64, the answer to ``choose`` at each level.
        rejections: ``[B, D]`` int64: at each level the first that many drafts are rejected and the next one is accepted.
    """

    def __init__(self, tokens: Tensor, rejections: Tensor) -> None:
        self.tokens, self.rejections = tokens, rejections
        self.chosen = torch.ones(tokens.shape, dtype=torch.float64)
        self.answered: dict[tuple[int, int], Tensor] = {}

    def choose(self, probabilities: Tensor, level: int) -> Tensor:
        token = self.tokens[:, level]
        self.chosen[:, level] = probabilities.gather(1, token[:, None])[:, 0]
        return token

    def accept(self, probability: Tensor, level: int, child: int) -> Tensor:
        yes = child >= self.rejections[:, level]
        self.answered[level, child] = torch.where(yes, probability, 1 - probability)
        return yes


def trees_of(nodes: int) -> Iterator[DraftTree]:
    """Yield every ordered rooted tree of ``nodes`` nodes, parents before children in depth-first order."""

    def grow(parents: list[int], rightmost: list[int]) -> Iterator[list[int]]:
        if len(parents) == nodes:
            yield parents
            return
        for i, parent in enumerate(rightmost):
            yield from grow([*parents, parent], [*rightmost[: i + 1], len(parents)])

    for parents in grow([-1], [0]):
        yield DraftTree(parents)


def _contexts(tree: DraftTree, tokens: Tensor, vocabulary: int) -> Tensor:
    """Return for each node of each row the base-V number of the tokens on its path below the root, ``[B, N]``."""
    columns = [torch.zeros_like(tokens[:, 0])]
    for t in range(1, len(tree)):
        columns.append(columns[tree.parents[t]] * vocabulary + tokens[:, t])
    return torch.stack(columns, 1)


def _assignments(tree: DraftTree, drafter: RandomTexts) -> tuple[Tensor, Tensor]:
    """Return every way to draw the tree's tokens, ``[R, N]``, and how probable each is, siblings without replacement."""
    V, depths = drafter.vocabulary, tree.depths
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    weight = torch.ones(1, dtype=torch.float64)
    for t in range(1, len(tree)):
        parent = tree.parents[t]
        context = torch.zeros_like(tokens[:, 0])
        for node in tree.path_to(parent)[1:]:
            context = context * V + tokens[:, node]
        left = drafter.after[depths[parent]][context].clone()
        for sibling in tree.children(parent):
            if sibling < t:
                left.scatter_(1, tokens[:, sibling : sibling + 1], 0)
        total = left.sum(1, keepdim=True)
        left = torch.where(total > 0, left / total, 0)
        tokens = torch.cat([tokens.repeat_interleave(V, 0), torch.arange(V).repeat(len(tokens))[:, None]], 1)
        weight = (weight[:, None] * left).reshape(-1)
        tokens, weight = tokens[weight > 0], weight[weight > 0]
    return tokens, weight


def _scripts(tree: DraftTree, vocabulary: int, is_drawn: bool) -> tuple[Tensor, Tensor]:
    """Return the answers ``tokens, rejections`` ``[S, D]`` of every script, one for each way the walk can go.

    A drawn tree's walk ends at one of the nodes, with all its children rejected, and a sampled bonus; a fixed tree's walk is a
    sampled token per level.
    """
    levels = max(tree.depths) + 1
    if not is_drawn:
        tokens = torch.tensor(list(itertools.product(range(vocabulary), repeat=levels)))
        return tokens, torch.zeros_like(tokens)
    answers = []
    for node in range(len(tree)):
        accepted = [tree.children(p).index(c) for p, c in itertools.pairwise(tree.path_to(node))]
        rejections = accepted + [len(tree)] * (levels - len(accepted))
        answers += [([bonus] * levels, rejections) for bonus in range(vocabulary)]
    return torch.tensor([tokens for tokens, _ in answers]), torch.tensor([rejections for _, rejections in answers])


def emitted_distribution(
    tree: DraftTree, target: RandomTexts, drafter: RandomTexts | None, tokens: Sequence[int] = ()
) -> Tensor:
    """Return ``[V ** D]``, how probable each text of D tokens is when ``tree`` is verified and the target continues.

    Args:
        drafter: the distribution the tree is drawn from, or None for a tree with the fixed ``tokens``.
    """
    V, levels = target.vocabulary, max(tree.depths) + 1
    if drafter is None:
        drawn, weight = torch.tensor([list(tokens)]), torch.ones(1, dtype=torch.float64)
    else:
        drawn, weight = _assignments(tree, drafter)
    answers, rejections = _scripts(tree, V, drafter is not None)
    texts = torch.zeros(V**levels, dtype=torch.float64)
    for part, part_weight in zip(drawn.split(2000), weight.split(2000), strict=True):
        count = len(answers)
        randomness = ScriptedRandomness(answers.repeat(len(part), 1), rejections.repeat(len(part), 1))
        part, part_weight = part.repeat_interleave(count, 0), part_weight.repeat_interleave(count)
        walk = _walk(tree, part, target, drafter, randomness)
        texts += _texts_of(walk, tree, part_weight, randomness, target, drafter is not None)
    return texts


def _walk(
    tree: DraftTree, tokens: Tensor, target: RandomTexts, drafter: RandomTexts | None, randomness: ScriptedRandomness
) -> Walk:
    parents = torch.tensor(tree.parents, dtype=torch.int32).expand(len(tokens), -1)
    context = _contexts(tree, tokens, target.vocabulary)
    depths = tree.depths
    of_node = torch.stack([target.after[depths[t]][context[:, t]].log() for t in range(len(tree))], 1)
    rows = torch.arange(len(tokens))
    rule: Rule
    if drafter is None:
        rule = match_sample(tokens, parents, randomness)
    else:
        q = torch.stack([drafter.after[depths[t]][context[:, t]] for t in range(len(tree))], 1)
        siblings = max(len(tree.children(t)) for t in range(len(tree)))
        rule = reject_drafts(tokens, parents, q, siblings, randomness)
    return walk_tree(tokens, parents, max(depths) + 1, lambda node, emitted, level: of_node[rows, node], rule)


def _texts_of(
    walk: Walk, tree: DraftTree, weight: Tensor, randomness: ScriptedRandomness, target: RandomTexts, is_drawn: bool
) -> Tensor:
    """Weigh each walk by the probabilities of the answers it used, continue it by the target, and add up the texts."""
    V, (rows, levels) = target.vocabulary, walk.emitted.shape
    children = torch.tensor([len(tree.children(t)) for t in range(len(tree))])
    for level in range(levels):
        is_visited = level < walk.count
        asked = children[walk.path[:, level].clamp(min=0).long()]
        for child in range(int(children.max())):
            if (level, child) in randomness.answered:
                used = is_visited & (child < asked) & (child <= randomness.rejections[:, level])
                weight = torch.where(used, weight * randomness.answered[level, child], weight)
        is_sampled = level == walk.count - 1 if is_drawn else is_visited
        weight = torch.where(is_sampled, weight * randomness.chosen[:, level], weight)
        if not is_drawn:
            # Scripts that differ in answers that were never asked for are one outcome: the one of zeros stands for them.
            weight = torch.where(~is_visited & (randomness.tokens[:, level] != 0), 0, weight)
    texts = torch.zeros(V**levels, dtype=torch.float64)
    prefix = torch.zeros(rows, dtype=torch.int64)
    for level in range(levels):
        prefix = prefix * V + walk.emitted[:, level].clamp(min=0)
        ends = walk.count == level + 1
        reached = torch.zeros(V ** (level + 1), dtype=torch.float64).index_add_(0, prefix[ends], weight[ends])
        for table in target.after[level + 1 :]:
            reached = (reached[:, None] * table).reshape(-1)
        texts += reached
    return texts


def largest_distance(vocabulary: int, nodes: int, generator: torch.Generator) -> tuple[float, int]:
    """Return the largest total variation from the target over all trees of ``nodes`` nodes, drawn and fixed, and how many.

    A tree with a node of more children than the vocabulary has tokens cannot be drawn and is left out.
    """
    worst, count = 0.0, 0
    for tree in trees_of(nodes):
        levels, widest = max(tree.depths) + 1, max(len(tree.children(t)) for t in range(nodes))
        if widest > vocabulary:
            continue
        target = RandomTexts(vocabulary, levels, generator)
        fixed = torch.randint(vocabulary, (nodes,), generator=generator).tolist()
        emitted = [emitted_distribution(tree, target, None, fixed)]
        if nodes > 1:
            drafter = RandomTexts(vocabulary, levels, generator, support=max(widest, 1))
            emitted.append(emitted_distribution(tree, target, drafter))
        for texts in emitted:
            worst = max(worst, float((texts - target.of_texts()).abs().sum() / 2))
            count += 1
    return worst, count
