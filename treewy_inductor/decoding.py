"""The decoding loop: draft a tree per row, verify all of them in one forward, accept, commit, repeat.

It knows nothing of transformers: a :class:`Verifier` stands for the target model and its cache. The last token of a prompt is
the root of the row's first tree, so the first step already verifies drafts. A row that has finished becomes inert. The host
reads the device once a step.

    B rows   N nodes of a verification   V vocabulary   D levels
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treewy_inductor.acceptance import accept_matching
from treewy_inductor.acceptance_walk import Rule, Walk, by_row, match_sample, reject_drafts, take_best, walk_tree
from treewy_inductor.compile_per_shape import compile_per_shape
from treewy_inductor.decoding_plan import Decoded, DecodingPlan, Verifier
from treewy_inductor.drafting import Draft, Drafter, DraftRequest, checked_drafts
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.sampling import SeededRandomness, draft_uniform
from treewy_inductor.target_scores import Reads, TargetScores


@dataclass
class _PlannedSampling:
    """How the target samples, as drafters see it; see :class:`DraftSampling`."""

    plan: DecodingPlan
    seeds: Tensor  # [rows of the request]
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


def _accept_most_likely(
    logits: Tensor, tokens: Tensor, parents: Tensor, ancestors: Tensor, depth: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``path, emitted, count, is_nan`` of greedy decoding without processors."""
    best, predicted = logits.max(-1)
    path, _, count = accept_matching(predicted, tokens, parents, ancestors, depth)
    node = path.clamp(min=0).long()
    is_nan = (best.gather(1, node).isnan() & (path >= 0)).any(1)
    return path, predicted.gather(1, node), count, is_nan


def _settle(path: Tensor, emitted: Tensor, count: Tensor, is_nan: Tensor, room: Tensor, eos: Tensor) -> tuple[Tensor, Tensor]:
    """Return the path cut at the end of each row, and what the host has to know, ``[B, D + 3]``.

    A row ends with its first end token or when its room is used up; a row whose scores are NaN commits nothing.
    """
    step = torch.arange(emitted.shape[1], device=path.device)
    is_end = (emitted[..., None] == eos).any(-1) & (step < count[:, None])
    until_end = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, emitted.shape[1])
    kept = torch.minimum(torch.minimum(count, room), until_end)
    kept = torch.where(is_nan, 0, kept)
    node = torch.arange(path.shape[1], device=path.device)
    cut = torch.where(node < kept[:, None], path, -1)
    return cut, torch.cat([emitted, count[:, None], kept[:, None], is_nan[:, None]], 1)


_accept_most_likely_compiled = compile_per_shape(_accept_most_likely)
_settle_compiled = compile_per_shape(_settle)


def decode(verifier: Verifier, drafter: Drafter, plan: DecodingPlan, statistics: GenerationStatistics | None = None) -> Decoded:
    """Decode all rows of ``plan`` to their end.

    Raises:
        ValueError: if the drafter's tree cannot be verified, or the target's scores are NaN. The verifier then holds what
            it had committed before, and may be used on.
    """
    return _Decoding(verifier, drafter, plan, statistics or GenerationStatistics()).run()


class _Decoding:
    def __init__(self, verifier: Verifier, drafter: Drafter, plan: DecodingPlan, statistics: GenerationStatistics) -> None:
        self.verifier, self.drafter, self.plan, self.statistics = verifier, drafter, plan, statistics
        rows = range(len(plan.prompts))
        self.tokens = [list(prompt) for prompt in plan.prompts]
        self.prefixes = [list(prefix) for prefix in plan.prefixes or plan.prompts]
        self.room = list(plan.room)
        self.running = [row for row in rows if plan.room[row] > 0]
        self.hidden: dict[int, Tensor] = {}
        self.eos = torch.tensor(plan.eos, dtype=torch.int64, device=verifier.device)
        self.seeds = None if plan.seeds is None else torch.tensor(plan.seeds, device=verifier.device)
        self.decoded = Decoded([[] for _ in rows], [[] for _ in rows], [[] for _ in rows])

    def run(self) -> Decoded:
        begin = getattr(self.drafter, "begin", None)
        if begin is not None:
            begin(len(self.tokens))
        started = time.perf_counter()
        waiting = {
            row: self.tokens[row][self.plan.held[row] : -1]
            for row in self.running
            if len(self.tokens[row]) > self.plan.held[row] + 1
        }
        if waiting:
            self.hidden = self.verifier.prefill(waiting)
        self.statistics.prefill_seconds += time.perf_counter() - started
        while self.running:
            self._step()
        return self.decoded

    def _step(self) -> None:
        started = time.perf_counter()
        drafts = self._drafts()
        drafted = time.perf_counter()
        trees = [drafts[row].tree if row in drafts else None for row in range(len(self.tokens))]
        nodes = torch.zeros(len(trees), self.verifier.max_nodes, dtype=torch.int64)
        for row, draft in drafts.items():
            nodes[row, : len(draft.tree)] = torch.tensor(draft.tree.tokens)
        nodes = nodes.to(self.verifier.device, non_blocking=True)
        logits, hidden = self.verifier.verify(trees, nodes)
        walk, is_nan = self._accept(logits, nodes, drafts)
        room = torch.tensor(self.room, device=logits.device)
        settle = _settle_compiled if self.verifier.encoding.compiled else _settle
        path, report = settle(walk.path, walk.emitted, walk.count, is_nan, room, self.eos)
        if self.plan.stops is None:
            self.verifier.commit(path)
        told = report.tolist()
        for row in list(self.running):
            if told[row][-1]:
                raise ValueError(
                    f"the model's scores for row {row} after {len(self.tokens[row])} tokens are NaN: check its weights and "
                    "dtype; the cache still holds the tokens before"
                )
        for row in list(self.running):
            count, kept = told[row][-3:-1]
            kept = self._stopped(row, told[row][:kept])
            if self.plan.stops is not None:
                path[row, kept:] = -1
            if hidden is not None:
                self.hidden[row] = hidden[row, path[row, :kept].long()]
            self._emit(row, told[row][:kept], count - 1, walk, logits)
            self.statistics.add_step(trees[row].depths, count - 1, kept)  # type: ignore[union-attr]
        if self.plan.stops is not None:
            self.verifier.commit(path)
        if self.statistics.forwards == 0:
            self.statistics.first_step_seconds = time.perf_counter() - started
        self.statistics.forwards += 1
        self.statistics.draft_seconds += drafted - started
        self.statistics.verify_seconds += time.perf_counter() - drafted

    def _drafts(self) -> dict[int, Draft]:
        sampling = None
        if self.seeds is not None:
            positions = torch.tensor([len(self.tokens[row]) for row in self.running], device=self.seeds.device)
            sampling = _PlannedSampling(self.plan, self.seeds[self.running], positions)
        hidden = None
        if getattr(self.drafter, "wants_hidden_states", False):
            hidden = [self.hidden.get(row, self._no_hidden()) for row in self.running]
        request = DraftRequest(
            rows=list(self.running),
            tokens=[list(self.tokens[row]) for row in self.running],
            room=[self.room[row] for row in self.running],
            max_nodes=self.verifier.max_nodes,
            widths=self.plan.widths,
            node_budget=self.plan.node_budget,
            hidden_states=hidden,
            sampling=sampling,
        )
        drafts = checked_drafts(self.drafter, request, self.verifier.vocab_size)
        return dict(zip(self.running, drafts, strict=True))

    def _no_hidden(self) -> Tensor:
        known = next(iter(self.hidden.values()), None)
        return torch.empty(0, 0 if known is None else known.shape[1], device=self.verifier.device)

    def _accept(self, logits: Tensor, nodes: Tensor, drafts: dict[int, Draft]) -> tuple[Walk, Tensor]:
        """Return where the walk led and ``[B]`` whether a score it looked at is NaN."""
        plan, encoding = self.plan, self.verifier.encoding
        if self.seeds is None and not plan.processors and not plan.keeps_scores and not plan.keeps_logits:
            accept = _accept_most_likely_compiled if encoding.compiled else _accept_most_likely
            path, emitted, count, is_nan = accept(logits, nodes, encoding.parents, encoding.ancestors, encoding.depth)
            return Walk(path, emitted, count, []), is_nan
        prefixes: list[Tensor | None] = [None] * len(self.tokens)
        if plan.reads is not Reads.SCORES:
            for row in drafts:
                prefixes[row] = torch.tensor(self.prefixes[row], device=logits.device)
        target = TargetScores(plan.processors, plan.reads, prefixes)
        rows = torch.arange(len(self.tokens), device=logits.device)

        def score(node: Tensor, emitted: Tensor, level: int) -> Tensor:
            return target(logits[rows, node], emitted)

        levels = max(max(draft.tree.depths) for draft in drafts.values()) + 1
        walk = walk_tree(nodes, encoding.parents, levels, score, self._rule(nodes, drafts))
        seen = torch.stack([scores.isnan().any(1) for scores in walk.scores], 1)
        level = torch.arange(levels, device=logits.device)
        return walk, (seen & (level < walk.count[:, None])).any(1)

    def _rule(self, nodes: Tensor, drafts: dict[int, Draft]) -> Rule:
        parents = self.verifier.encoding.parents
        if self.seeds is None:
            return take_best(nodes, parents)
        positions = torch.tensor([len(tokens) for tokens in self.tokens], device=nodes.device)
        randomness = SeededRandomness(self.seeds, positions)
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
        is_drawn = torch.tensor([row in drawn for row in range(len(self.tokens))], device=nodes.device)
        return by_row(is_drawn, reject, match)

    def _stopped(self, row: int, new: list[int]) -> int:
        """Return how many of the ``new`` tokens come before the user's criteria stop the row, the stopping one included."""
        if self.plan.stops is not None:
            for count in range(1, len(new) + 1):
                if self.plan.stops(row, self.prefixes[row] + new[:count]):
                    self.room[row] = count
                    return count
        return len(new)

    def _emit(self, row: int, new: list[int], accepted: int, walk: Walk, logits: Tensor) -> None:
        self.tokens[row] += new
        self.prefixes[row] += new
        self.decoded.tokens[row] += new
        self.room[row] -= len(new)
        if self.plan.keeps_scores:
            self.decoded.scores[row] += [walk.scores[level][row] for level in range(len(new))]
        if self.plan.keeps_logits:
            nodes = walk.path[row, : len(new)].long()
            self.decoded.logits[row] += list(logits[row, nodes].float())
        if self.room[row] <= 0 or new[-1] in self.plan.eos:
            self.running.remove(row)
        if self.plan.on_tokens is not None:
            self.plan.on_tokens(row, new, min(accepted, len(new)))
