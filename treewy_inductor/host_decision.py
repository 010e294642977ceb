"""What a step decides from a verification's logits where the host takes part in it.

That is so for logits processors that read tokens, for drafts that were drawn, and where scores are kept: the walk then needs
each row's tokens or distributions, which no captured step holds.

    B rows   N nodes of a verification   V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treewy_inductor.acceptance_walk import Rule, Walk, by_row, match_sample, reject_drafts, take_best, walk_tree
from treewy_inductor.decoding_plan import DecodingPlan
from treewy_inductor.drafting import Draft
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.sampling import SeededRandomness
from treewy_inductor.step_decisions import is_unfit, most_likely
from treewy_inductor.target_scores import Reads, TargetScores


def decide_on_host(
    plan: DecodingPlan,
    logits: Tensor,
    nodes: Tensor,
    encoding: TreeEncoding,
    drafts: dict[int, Draft],
    prefixes: Sequence[list[int]],
    seeds: Tensor | None,
    positions: Sequence[int],
) -> tuple[Walk, Tensor]:
    """Return where the walk led and ``[B]`` whether a score it looked at is NaN, or left no token to sample.

    Args:
        logits: ``[B, N, V]``.
        nodes: ``[B, N]`` int64, the trees' tokens.
        drafts: of the rows that run.
        prefixes: each row's tokens as the processors see them.
        seeds: ``[B]`` int64, None under greedy decoding.
        positions: how many tokens each row holds.
    """
    if seeds is None and not plan.processors and not plan.keeps_scores and not plan.keeps_logits:
        path, emitted, count, is_nan = most_likely(logits, nodes, encoding)
        return Walk(path, emitted, count, []), is_nan
    seen: list[Tensor | None] = [None] * len(nodes)
    if plan.reads is not Reads.SCORES:
        for row in drafts:
            seen[row] = torch.tensor(prefixes[row], device=logits.device)
    target = TargetScores(plan.processors, plan.reads, seen)
    rows = torch.arange(len(nodes), device=logits.device)

    def score(node: Tensor, emitted: Tensor, level: int) -> Tensor:
        return target(logits[rows, node], emitted)

    levels = max(max(draft.tree.depths) for draft in drafts.values()) + 1
    rule = take_best(nodes, encoding.parents)
    if seeds is not None:
        randomness = SeededRandomness(seeds, torch.tensor(positions, device=nodes.device))
        rule = _sampling_rule(nodes, encoding.parents, drafts, randomness)
    walk = walk_tree(nodes, encoding.parents, levels, score, rule)
    return walk, is_unfit(walk, is_sampled=seeds is not None)


def _sampling_rule(nodes: Tensor, parents: Tensor, drafts: dict[int, Draft], randomness: SeededRandomness) -> Rule:
    """Return the rule of rejection in rows whose drafts were drawn, and of sample-and-match in the others."""
    match = match_sample(nodes, parents, randomness)
    drawn = {row: draft.probabilities for row, draft in drafts.items() if draft.probabilities is not None}
    if not drawn:
        return match
    like = next(iter(drawn.values()))
    probabilities = torch.zeros((*nodes.shape, like.shape[1]), dtype=like.dtype, device=nodes.device)
    for row, distributions in drawn.items():
        probabilities[row, : len(distributions)] = distributions
    siblings = max(max(map(drafts[row].tree.parents.count, set(drafts[row].tree.parents))) for row in drawn)
    reject = reject_drafts(nodes, parents, probabilities, siblings, randomness)
    is_drawn = torch.tensor([row in drawn for row in range(len(nodes))], device=nodes.device)
    return by_row(is_drawn, reject, match)
