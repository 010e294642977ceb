"""How the target samples, as drafters that draw their tokens see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treewy_inductor.decoding_plan import DecodingPlan
from treewy_inductor.sampling import draft_uniform
from treewy_inductor.target_scores import Reads, TargetScores


@dataclass
class PlannedSampling:
    """See :class:`treewy_inductor.drafting.DraftSampling`.

    Args:
        seeds, positions: ``[R]`` int64 of the running rows; a row's position is how many tokens it holds.
    """

    plan: DecodingPlan
    seeds: Tensor
    positions: Tensor

    def probabilities(self, logits: Tensor) -> Tensor:
        # Processors that look at tokens are left out: a drafter's distribution need not be the target's.
        scores = logits.float().clone()
        if self.plan.reads is Reads.SCORES:
            scores = TargetScores(self.plan.processors, Reads.SCORES, ())(scores, scores.new_empty(0).long())
        return scores.double().softmax(-1)

    def uniforms(self, entries: Sequence[int], draws: Sequence[int]) -> Tensor:
        index = torch.tensor(entries, device=self.seeds.device)
        return draft_uniform(self.seeds[index], self.positions[index], torch.tensor(draws, device=self.seeds.device))
