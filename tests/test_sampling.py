"""Random choices, and that the acceptance rules emit exactly the target's distribution."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from bench.enumerate_acceptance import RandomTexts, emitted_distribution, largest_distance, trees_of
from bench.lossless import chi_square_p
from bench.markov_text import MarkovDrafter, MarkovVerifier, random_chain
from treewy_inductor.acceptance_walk import match_sample, reject_drafts, walk_tree
from treewy_inductor.decoding import decode
from treewy_inductor.decoding_plan import DecodingPlan
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.sampling import SeededRandomness, choose, draw_without_replacement, uniform
from treewy_inductor.tree import DraftTree


def test_uniform_numbers_are_uniform_and_do_not_hang_together() -> None:
    seeds = torch.arange(40_000)
    for streams in (0, 1 << 20, 1 << 32):
        u = uniform(seeds, torch.tensor(7), streams)
        assert ((u >= 0) & (u < 1)).all()
        counts = torch.bincount((u * 100).long(), minlength=100)
        assert 0.001 < chi_square_p(counts.double(), torch.full((100,), 400.0, dtype=torch.float64)) < 0.999
    neighbours = [
        (uniform(seeds, torch.tensor(7), 0), uniform(seeds + 1, torch.tensor(7), 0)),
        (uniform(seeds, torch.tensor(7), 0), uniform(seeds, torch.tensor(8), 0)),
        (uniform(seeds, torch.tensor(7), 0), uniform(seeds, torch.tensor(7), 1)),
    ]
    for one, other in neighbours:
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 4 / 200


def test_choose_meets_every_probability_exactly_on_a_grid() -> None:
    weights = torch.tensor([[3, 0, 5, 4], [0, 0, 12, 0], [1, 1, 0, 10]], dtype=torch.float64)
    u = (torch.arange(12, dtype=torch.float64) + 0.5) / 12
    for row in weights:
        chosen = choose((row / 12).expand(12, -1), u)
        assert torch.bincount(chosen, minlength=4).tolist() == row.tolist()


def test_choose_never_takes_a_token_of_probability_zero() -> None:
    edge = torch.tensor([0.0, 1 - 2.0**-53])
    probabilities = torch.tensor([0.0, 0.1, 0.2, 0.7 + 2e-16, 0.0], dtype=torch.float64)
    for scale in (1.0, 1 / 3, 7.0):
        assert choose((probabilities * scale).expand(2, -1), edge.double()).tolist() == [1, 3]


def test_draws_without_replacement_differ_and_end_with_the_support() -> None:
    probabilities = torch.tensor([[0.5, 0.0, 0.5, 0.0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    drawn = draw_without_replacement(probabilities, torch.full((2, 4), 0.6, dtype=torch.float64))
    assert drawn[0].tolist() == [2, 0, -1, -1]
    assert sorted(drawn[1].tolist()) == [0, 1, 2, 3]


def test_trees_are_all_ordered_trees() -> None:
    assert [sum(1 for _ in trees_of(n)) for n in range(1, 8)] == [1, 1, 2, 5, 14, 42, 132]


@pytest.mark.parametrize(("vocabulary", "nodes"), [*itertools.product((3, 4), range(1, 7)), (5, 5), (3, 7)])
def test_enumerated_texts_have_the_targets_distribution(vocabulary: int, nodes: int) -> None:
    distance, count = largest_distance(vocabulary, nodes, torch.Generator().manual_seed(nodes))
    assert count > 0
    assert distance < 1e-12


def test_the_enumeration_sees_a_rule_that_is_not_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench.enumerate_acceptance as enumeration

    def forgets_the_residual(tokens: Tensor, parents: Tensor, q: Tensor, siblings: int, randomness: object):  # type: ignore
        rule = reject_drafts(tokens, parents, q, siblings, randomness)  # type: ignore[arg-type]

        def wrong(scores: Tensor, node: Tensor, level: int) -> tuple[Tensor, Tensor]:
            token, child = rule(scores, node, level)
            bonus = randomness.choose(scores.softmax(-1), level)  # type: ignore[attr-defined]
            return torch.where(child >= 0, token, bonus), child

        return wrong

    monkeypatch.setattr(enumeration, "reject_drafts", forgets_the_residual)
    generator = torch.Generator().manual_seed(0)
    target, drafter = (RandomTexts(3, 2, generator, support=2) for _ in range(2))
    emitted = emitted_distribution(DraftTree([-1, 0, 0]), target, drafter)
    assert float((emitted - target.of_texts()).abs().sum() / 2) > 1e-3


def test_chain_rejection_accepts_with_the_papers_probability() -> None:
    rows = 20_000
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    tokens = torch.tensor([[0, 2]]).expand(rows, -1)
    parents = torch.tensor([[-1, 0]], dtype=torch.int32).expand(rows, -1)
    randomness = SeededRandomness(torch.arange(rows), torch.full((rows,), 5))
    rule = reject_drafts(tokens, parents, q.expand(rows, 2, -1), 1, randomness)
    walk = walk_tree(tokens, parents, 2, lambda node, emitted, level: p.log().expand(rows, -1), rule)
    accepted = (walk.count == 2).double().mean()
    assert abs(float(accepted) - 0.2 / 0.6) < 4 * (2 / 9 / rows) ** 0.5
    # What is left of p after q is (0.3, 0.1, 0) normalised.
    rejected = walk.emitted[walk.count == 1, 0]
    assert set(rejected.tolist()) == {0, 1}
    assert abs(float((rejected == 0).double().mean()) - 0.75) < 4 * (3 / 16 / len(rejected)) ** 0.5


def test_the_loop_samples_the_target() -> None:
    target, other = random_chain(4, 1), random_chain(4, 2)
    rows = 6000
    expected = _texts(target.softmax(-1), 3)
    for sample in (None, False):
        plan = DecodingPlan([[0, 1]] * rows, [0] * rows, [3] * rows, widths=(2, 2), seeds=list(range(rows)))
        statistics = GenerationStatistics()
        drafter = MarkovDrafter(target + 0.8 * other, sample)
        decoded = decode(MarkovVerifier(target, rows, 7), drafter, plan, statistics)
        codes = (torch.tensor(decoded.tokens) * torch.tensor([16, 4, 1])).sum(1)
        observed = torch.bincount(codes, minlength=64).double()
        assert 0.001 < chi_square_p(observed, expected * rows) < 0.999
        assert statistics.tokens_per_step > 1.5


def test_a_wrong_distribution_fails_the_chi_square() -> None:
    target, rows = random_chain(4, 1), 6000
    plan = DecodingPlan([[0, 1]] * rows, [0] * rows, [3] * rows, widths=(), seeds=list(range(rows)))
    decoded = decode(MarkovVerifier(target * 1.5, rows, 2), MarkovDrafter(target), plan)
    codes = (torch.tensor(decoded.tokens) * torch.tensor([16, 4, 1])).sum(1)
    assert chi_square_p(torch.bincount(codes, minlength=64).double(), _texts(target.softmax(-1), 3) * rows) < 1e-4


def test_deterministic_trees_give_the_text_of_plain_sampling() -> None:
    target, rows = random_chain(5, 3), 50
    texts = []
    for widths, seed in (((), 0), ((1, 1, 1), 4), ((3, 2), 5)):
        plan = DecodingPlan([[0, 1]] * rows, [0] * rows, [12] * rows, widths=widths, seeds=list(range(rows)))
        drafter = MarkovDrafter(random_chain(5, seed), sample=False)
        texts.append(decode(MarkovVerifier(target, rows, 16), drafter, plan).tokens)
    assert texts[0] == texts[1] == texts[2]


def test_match_leaves_rows_without_nodes_alone() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    parents = torch.tensor([[-1, 0, 0], [-2, -2, -2]], dtype=torch.int32)
    randomness = SeededRandomness(torch.arange(2), torch.zeros(2, dtype=torch.int64))
    scores = torch.full((2, 4), torch.nan).index_fill(0, torch.tensor([0]), 0.0)
    walk = walk_tree(tokens, parents, 2, lambda node, emitted, level: scores, match_sample(tokens, parents, randomness))
    assert walk.count[1] == 0
    assert walk.path[1].tolist() == [-1, -1, -1]
    assert walk.emitted[1].tolist() == [-1, -1]


def _texts(after: Tensor, length: int) -> Tensor:
    """Return the probability of every text of ``length`` tokens after the tokens 0, 1."""
    vocabulary = after.shape[0]
    found = []
    for text in itertools.product(range(vocabulary), repeat=length):
        probability, before = 1.0, (0, 1)
        for token in text:
            probability *= float(after[before][token])
            before = before[1], token
        found.append(probability)
    return torch.tensor(found, dtype=torch.float64)
