"""Drafters that look continuations up instead of running a model.

The last tokens of a row are looked for, the longest run of them first, in the row's own past (:class:`PromptLookup`) or in a
given corpus (:class:`CorpusLookup`). What followed each find is a path; the paths are merged in a trie, so that distinct
continuations become branches. Siblings are ordered by the longest run that found them, then by how often they were found,
then by how late, and cut to the requested widths; under a node budget the nodes are taken in the order of that evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from treewy_inductor.drafting import DraftRequest
from treewy_inductor.ngram_index import NgramIndex
from treewy_inductor.tree import ROOT, DraftTree


@dataclass
class _Branch:
    evidence: list[int] = field(default_factory=lambda: [0, 0, 0])
    children: dict[int, _Branch] = field(default_factory=dict)

    def ranked(self) -> list[tuple[int, _Branch]]:
        return sorted(self.children.items(), key=lambda child: child[1].evidence, reverse=True)


def _merged(paths: Iterable[tuple[int, int, Sequence[int]]]) -> _Branch:
    """Return the trie of ``(run length, place, continuation)``; a branch's evidence is (longest run, finds, latest place)."""
    root = _Branch()
    for length, place, tokens in paths:
        branch = root
        for token in tokens:
            branch = branch.children.setdefault(token, _Branch())
            longest, finds, latest = branch.evidence
            branch.evidence = [max(longest, length), finds + 1, max(latest, place)]
    return root


def _cut_to_widths(root: _Branch, token: int, widths: Sequence[int], max_nodes: int) -> DraftTree:
    parents, tokens = [ROOT], [token]
    level = [(0, root)]
    for width in widths:
        below = []
        for node, branch in level:
            for child_token, child in branch.ranked()[:width]:
                if len(parents) < max_nodes:
                    below.append((len(parents), child))
                    parents.append(node)
                    tokens.append(child_token)
        level = below
    return DraftTree(parents, tokens)


def _cut_to_budget(root: _Branch, token: int, budget: int) -> DraftTree:
    """Return the nodes of most evidence; a child never has more than its parent, so taking the best open one is exact."""
    parents, tokens = [ROOT], [token]
    opened = [(child.evidence, 0, child_token, child) for child_token, child in root.ranked()]
    while opened and len(parents) < budget:
        best = max(range(len(opened)), key=lambda i: opened[i][0])
        _, parent, child_token, branch = opened.pop(best)
        node = len(parents)
        parents.append(parent)
        tokens.append(child_token)
        opened += [(child.evidence, node, t, child) for t, child in branch.ranked()]
    return DraftTree(parents, tokens)


def _tree_of_finds(index: NgramIndex, request: DraftRequest, entry: int, max_finds: int, max_depth: int) -> DraftTree:
    tokens = request.tokens[entry]
    depth = min(request.room[entry] - 1, max_depth if request.widths is None else len(request.widths))
    found = index.find(tokens, max_finds)
    root = _merged((length, place, index.continuation(place, depth)) for length, place in found)
    if request.widths is not None:
        return _cut_to_widths(root, tokens[-1], request.widths[: max(depth, 0)], request.max_nodes)
    return _cut_to_budget(root, tokens[-1], min(request.node_budget or request.max_nodes, request.max_nodes))


class PromptLookup:
    """Drafts what followed the last tokens earlier in the same row, prompt and generated text alike.

    Args:
        longest: tokens of the longest run looked for.
        max_finds: places whose continuations are merged.
        max_depth: of the tree under a node budget; widths bring their own depth.
    """

    def __init__(self, longest: int = 4, max_finds: int = 64, max_depth: int = 8) -> None:
        if longest < 1:
            raise ValueError(f"longest is {longest}, expected at least 1: the run of tokens to look for")
        self.longest, self.max_finds, self.max_depth = longest, max_finds, max_depth
        self._index_of: dict[int, NgramIndex] = {}

    def begin(self, batch_size: int) -> None:
        self._index_of = {}

    def draft(self, request: DraftRequest) -> list[DraftTree]:
        trees = []
        for entry, (row, tokens) in enumerate(zip(request.rows, request.tokens, strict=True)):
            index = self._index_of.setdefault(row, NgramIndex(self.longest))
            index.extend(tokens[len(index.tokens) :])
            trees.append(_tree_of_finds(index, request, entry, self.max_finds, self.max_depth))
        return trees


class CorpusLookup:
    """Drafts what followed the last tokens in a fixed corpus of token sequences.

    Args:
        corpus: token sequences; a continuation never runs from one into the next.
        longest, max_finds, max_depth: as in :class:`PromptLookup`.
    """

    def __init__(self, corpus: Iterable[Sequence[int]], longest: int = 4, max_finds: int = 64, max_depth: int = 8) -> None:
        self.max_finds, self.max_depth = max_finds, max_depth
        self._index = NgramIndex(longest)
        for sequence in corpus:
            self._index.extend(sequence)
            self._index.extend([-1])

    def draft(self, request: DraftRequest) -> list[DraftTree]:
        entries = range(len(request.rows))
        return [_tree_of_finds(self._index, request, entry, self.max_finds, self.max_depth) for entry in entries]
