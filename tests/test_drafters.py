"""Drafters: what they propose, within the tree they are given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tiny_models import tiny_model
from treewy_inductor.drafters import CorpusLookup, PromptLookup
from treewy_inductor.drafting import Draft, DraftRequest, RowByRow, as_drafter, checked_drafts
from treewy_inductor.grow_tree import FrontierNode, grow_trees
from treewy_inductor.models.assistant_drafter import AssistantDrafter
from treewy_inductor.ngram_index import NgramIndex
from treewy_inductor.tree import DraftTree


def request(*tokens: list[int], widths: tuple[int, ...] | None = (3, 3), **more: object) -> DraftRequest:
    return DraftRequest(
        rows=list(range(len(tokens))),
        tokens=list(tokens),
        room=[100] * len(tokens),
        max_nodes=40,
        widths=widths,
        **more,  # type: ignore[arg-type]
    )


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """Return the token paths below the root to every node."""
    assert tree.tokens is not None
    return {tuple(tree.tokens[t] for t in tree.path_to(node)[1:]) for node in range(1, len(tree))}


def test_index_finds_longest_runs_first_then_latest_places() -> None:
    index = NgramIndex(3)
    index.extend([1, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3])
    assert index.find([0, 1, 2, 3], most=9) == [(3, 3), (2, 6), (1, 8)]
    assert index.find([1, 2, 3], most=2) == [(3, 3), (2, 6)]
    assert index.continuation(3, 2) == [9, 2]


def test_distinct_continuations_become_branches() -> None:
    (tree,) = PromptLookup().draft(request([1, 2, 3, 4, 1, 2, 5, 6, 1, 2]))
    assert paths(tree) == {(5,), (5, 6), (3,), (3, 4)}
    # Equal evidence: what was seen last comes first.
    assert tree.tokens == [2, 5, 3, 6, 4]


def test_siblings_stand_in_order_of_run_length_then_frequency() -> None:
    text = [7, 1, 4, 9, 1, 5, 8, 1, 6, 8, 1, 6, 7, 1]
    (tree,) = PromptLookup().draft(request(text, widths=(2,)))
    # 4 followed the longer run 7 1; 6 followed 1 twice and 5 once.
    assert tree.tokens == [1, 4, 6]


def test_lookup_keeps_within_widths_room_and_nodes() -> None:
    text = [1, 2, 1, 3, 1, 4, 1, 5, 1]
    whole = request(text, widths=(3, 2))
    (tree,) = PromptLookup().draft(whole)
    assert max(tree.depths) == 2
    assert len(tree.children(0)) == 3
    short = DraftRequest([0], [text], [2], 40, widths=(3, 2))
    assert max(PromptLookup().draft(short)[0].depths) == 1
    last = DraftRequest([0], [text], [1], 40, widths=(3, 2))
    assert len(PromptLookup().draft(last)[0]) == 1
    tight = DraftRequest([0], [text], [100], 3, widths=(3, 2))
    assert len(PromptLookup().draft(tight)[0]) == 3


def test_a_budget_goes_where_the_evidence_is() -> None:
    text = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 9, 9, 1, 2]
    (tree,) = PromptLookup().draft(request(text, widths=None, node_budget=4))
    assert len(tree) == 4
    assert {(3,), (3, 4)} <= paths(tree)


def test_lookup_follows_a_growing_row_and_forgets_it_for_the_next_generation() -> None:
    drafter = PromptLookup()
    assert len(drafter.draft(request([1, 2, 3]))[0]) == 1
    assert paths(drafter.draft(request([1, 2, 3, 1]))[0]) == {(2,), (2, 3)}
    drafter.begin(1)
    assert len(drafter.draft(request([4, 5]))[0]) == 1


def test_corpus_continuations_end_with_their_text() -> None:
    drafter = CorpusLookup([[1, 2, 3], [4, 2, 5, 6]])
    trees = drafter.draft(request([0, 2], [3]))
    assert paths(trees[0]) == {(3,), (5,), (5, 6)}
    assert len(trees[1]) == 1


def bigram(logits: Tensor):  # type: ignore[no-untyped-def]
    return lambda frontier: logits[torch.tensor([node.token for node in frontier])]


def test_grown_widths_are_the_most_probable_tokens() -> None:
    logits = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    (draft,) = grow_trees(request([3], widths=(2, 1)), bigram(logits))
    first = logits[3].topk(2).indices.tolist()
    assert draft.tree.tokens == [3, *first, *(int(logits[token].argmax()) for token in first)]
    assert draft.tree.parents == [-1, 0, 0, 1, 2]
    assert draft.probabilities is None


@pytest.mark.parametrize("budget", [2, 5, 9, 20])
def test_best_first_growth_takes_the_most_probable_nodes_of_all(budget: int) -> None:
    logits = 2 * torch.randn(5, 5, generator=torch.Generator().manual_seed(2))
    drafts = grow_trees(request([3], [1], widths=None, node_budget=budget), bigram(logits), max_depth=4)
    log_p = logits.log_softmax(-1)
    for start, draft in zip((3, 1), drafts, strict=True):
        every = {(): 0.0}
        for depth in range(4):
            every |= {
                (*path, token): value + float(log_p[path[-1] if path else start, token])
                for path, value in every.items()
                if len(path) == depth
                for token in range(5)
            }
        best = sorted(every, key=lambda path: -every[path])[:budget]
        assert paths(draft.tree) | {()} == set(best)


def test_growth_asks_once_a_level_for_all_rows_and_not_below_the_last() -> None:
    asked: list[list[FrontierNode]] = []

    def extend(frontier: list[FrontierNode]) -> Tensor:
        asked.append(frontier)
        return torch.zeros(len(frontier), 8)

    grow_trees(request([3], [1], widths=(2, 2)), extend)
    assert [len(frontier) for frontier in asked] == [2, 4]
    assert {(node.entry, node.depth, node.parent) for node in asked[1]} == {(0, 1, 0), (1, 1, 0)}


def test_the_assistants_tree_holds_its_own_predictions() -> None:
    model = tiny_model(seed=4)
    drafter = AssistantDrafter(model)
    drafter.begin(2)
    for texts in (([5, 6, 7], [9]), ([5, 6, 7, 8, 1], [9, 3])):
        trees = [draft.tree for draft in drafter.draft(request(*texts, widths=(2, 2, 1)))]
        for text, tree in zip(texts, trees, strict=True):
            assert tree.tokens is not None
            for node in range(len(tree)):
                children = tree.children(node)
                if not children:
                    continue
                before = text[:-1] + [tree.tokens[t] for t in tree.path_to(node)]
                with torch.no_grad():
                    logits = model(torch.tensor([before])).logits[0, -1]
                assert [tree.tokens[t] for t in children] == logits.topk(len(children)).indices.tolist()


def test_callables_and_objects_are_drafters_and_nothing_else_is() -> None:
    lookup = PromptLookup()
    assert as_drafter(lookup) is lookup
    one = as_drafter(lambda tokens: DraftTree([-1], [tokens[-1]]))
    assert isinstance(one, RowByRow)
    assert [tree.tokens for tree in one.draft(request([1, 2], [3]))] == [[2], [3]]
    with pytest.raises(ValueError, match="drafter is a int"):
        as_drafter(3)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "0 trees for 1 rows"),
        ([DraftTree([-1])], "no tokens for row 0"),
        ([DraftTree([-1, 0], [1, 5])], "token 5 at node 1"),
        ([DraftTree([-1, 0], [2, 3])], "whose last token is 1"),
        ([DraftTree([-1] + [0] * 40, [1] * 41)], "41 nodes for row 0, but the cache verifies at most 40"),
        ([Draft(DraftTree([-1, 0], [1, 2]), torch.zeros(1, 5))], r"probabilities \[1, 5\] for row 0, expected \[2, 5\]"),
        ([Draft(DraftTree([-1, 0, 0], [1, 2, 2]), torch.ones(3, 5))], "drew one token twice"),
    ],
)
def test_unfit_drafts_are_refused(answer: list[object], message: str) -> None:
    class Answers:
        def draft(self, request: DraftRequest) -> list[object]:
            return answer

    with pytest.raises(ValueError, match=message):
        checked_drafts(Answers(), request([1]), vocab_size=5)  # type: ignore[arg-type]
