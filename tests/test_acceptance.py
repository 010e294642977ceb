"""Greedy acceptance against a walk over the tree that reads one prediction after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.trees import BRANCHES, CHAIN, FOREST, INERT_BETWEEN, ROOT_ALONE, batch_of, random_parents
from treewy_inductor.acceptance import greedy_accept
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.tree import DraftTree


def walk(parents: list[int], tokens: list[int], predicted: list[int]) -> tuple[list[int], int]:
    """Follow the predictions from node 0 down; return the path and the token after it."""
    path = [0]
    while True:
        following = [t for t, parent in enumerate(parents) if parent == path[-1] and tokens[t] == predicted[path[-1]]]
        if not following:
            return path, predicted[path[-1]]
        path.append(following[0])


def logits_of(predicted: Tensor, vocab: int) -> Tensor:
    return torch.randn(*predicted.shape, vocab).scatter(2, predicted[..., None], 9.0)


@pytest.mark.parametrize("nodes", [1, 5, 63, 64, 65, 200])
def test_path_is_what_a_walk_finds(nodes: int) -> None:
    trees = [random_parents(nodes, seed, inert=0.1 * (seed % 3)) for seed in range(12)]
    parents, vocab = batch_of(*trees), 3
    tokens, predicted = torch.randint(vocab, parents.shape), torch.randint(vocab, parents.shape)
    encoding = TreeEncoding(*parents.shape).fill(parents)
    path, bonus, count = greedy_accept(logits_of(predicted, vocab), tokens, encoding)
    assert path.dtype == torch.int32
    lengths = set()
    for row, tree in enumerate(trees):
        expected, after = walk(tree, tokens[row].tolist(), predicted[row].tolist())
        assert path[row].tolist() == expected + [-1] * (nodes - len(expected))
        assert int(bonus[row]) == after
        assert int(count[row]) == len(expected)
        lengths.add(len(expected))
    assert nodes == 1 or len(lengths) > 1


def test_whole_chain_and_root_alone() -> None:
    encoding = TreeEncoding(2, 7).fill(batch_of(CHAIN, ROOT_ALONE))
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5, 6]] * 2)
    path, bonus, count = greedy_accept(logits_of(tokens + 1, 9), tokens, encoding)
    assert path.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, -1, -1, -1, -1, -1, -1]]
    assert bonus.tolist() == [7, 1]
    assert count.tolist() == [7, 1]


def test_of_equal_siblings_the_first_is_followed() -> None:
    tree = DraftTree([-1, 0, 0, 1, 2], [5, 6, 6, 7, 8])
    encoding = TreeEncoding.of(tree)
    predicted = torch.tensor([[6, 8, 8, 0, 0]])
    path, bonus, _ = greedy_accept(logits_of(predicted, 9), torch.tensor([tree.tokens]), encoding)
    assert path[0].tolist() == [0, 1, -1, -1, -1]
    assert bonus.tolist() == [8]


def test_another_root_of_a_forest_is_never_accepted() -> None:
    encoding = TreeEncoding(1, len(FOREST)).fill(batch_of(FOREST))
    tokens = torch.zeros(1, len(FOREST), dtype=torch.int64)
    path, _, count = greedy_accept(logits_of(tokens, 2), tokens, encoding)
    assert path[0, : int(count)].tolist() == [0, 1]


def test_row_without_nodes_accepts_nothing() -> None:
    encoding = TreeEncoding(2, 8).fill(batch_of(INERT_BETWEEN, [-2] * 8))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    path, bonus, count = greedy_accept(logits_of(tokens, 2), tokens, encoding)
    assert path.tolist() == [[0, 2, -1, -1, -1, -1, -1, -1], [-1] * 8]
    assert bonus.tolist() == [0, -1]
    assert count.tolist() == [2, 0]


def test_rejected_and_inert_nodes_have_no_say() -> None:
    parents = batch_of([*BRANCHES, -2, -2])
    encoding = TreeEncoding(*parents.shape).fill(parents)
    tokens = torch.arange(11)[None]
    predicted = torch.tensor([[2, 0, 5, 0, 0, 3, 0, 0, 0, 0, 0]])
    logits = logits_of(predicted, 11)
    poisoned, other = logits.clone(), tokens.clone()
    poisoned[0, [1, 3, 4, 6, 7, 8, 9, 10]] = torch.nan
    other[0, 9:] = 2
    clean = greedy_accept(logits, tokens, encoding)
    assert clean[0][0, :4].tolist() == [0, 2, 5, -1]
    for a, b in zip(clean, greedy_accept(poisoned, other, encoding), strict=True):
        assert torch.equal(a, b)


def test_compiled_acceptance_agrees() -> None:
    parents = batch_of(BRANCHES, CHAIN)
    tokens, logits = torch.randint(3, parents.shape), torch.randn(*parents.shape, 3)
    eager = TreeEncoding(*parents.shape).fill(parents)
    compiled = TreeEncoding(*parents.shape).fill(parents)
    compiled.compiled = True
    for a, b in zip(greedy_accept(logits, tokens, eager), greedy_accept(logits, tokens, compiled), strict=True):
        assert torch.equal(a, b)


def test_wrong_shapes_are_refused() -> None:
    encoding = TreeEncoding(1, 7).fill(batch_of(CHAIN))
    with pytest.raises(ValueError, match=r"logits \[1, 5, 3\] and tokens \[1, 5\] for trees of \[1, 7\]"):
        greedy_accept(torch.randn(1, 5, 3), torch.zeros(1, 5, dtype=torch.int64), encoding)
