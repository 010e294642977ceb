"""The decoding loop: draft a tree per row, verify all of them in one forward, accept, commit, repeat.

It knows nothing of transformers: a :class:`Verifier` stands for the target model and its cache. The last token of a prompt is
the root of the row's first tree, so the first step already verifies drafts. A row that has finished becomes inert. The host
reads the device once a step.

    B rows   N nodes of a verification   V vocabulary   D levels
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from treewy_inductor.captured_decoding import CapturedDecoding
from treewy_inductor.decoding_plan import Decoded, DecodingPlan, Verifier
from treewy_inductor.drafting import Draft, Drafter, DraftRequest, checked_drafts
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.host_decision import decide_on_host
from treewy_inductor.planned_sampling import PlannedSampling
from treewy_inductor.step_decisions import Decision, settle
from treewy_inductor.tree import DraftTree

# Levels below the root that a captured walk follows where no widths say it; a deeper tree is walked step by step.
DEEPEST = 8


@dataclass
class _Outcome:
    """What one step found.

    Args:
        told: per row the emitted tokens, then how many nodes were accepted, how many tokens hold, and whether scores are unfit.
        path: ``[B, N]``, cut to the tokens that hold; not committed yet if the user's criteria may cut it further.
        hidden: ``[B, N, hidden]``, if wanted.
        scores: per level the ``[B, V]`` that decided it, where the walk was made here.
        logits: ``[B, N, V]``, likewise.
    """

    told: list[list[int]]
    path: Tensor
    hidden: Tensor | None
    scores: list[Tensor]
    logits: Tensor | None


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
        self.shape = DraftTree.from_widths(plan.widths or ())
        self.captured: CapturedDecoding | None = None
        self.drafts_on_device = False

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
        if self.running:
            self._capture()
        self.statistics.prefill_seconds += time.perf_counter() - started
        while self.running:
            self._step()
        return self.decoded

    def _step(self) -> None:
        started = time.perf_counter()
        drafts = {} if self.drafts_on_device else self._drafts()
        drafted = time.perf_counter()
        nodes = torch.zeros(len(self.tokens), self.verifier.max_nodes, dtype=torch.int64)
        for row in self.running:
            known = drafts[row].tree.tokens if row in drafts else self.tokens[row][-1:]
            nodes[row, : len(known)] = torch.tensor(known)  # type: ignore[arg-type]
        outcome = self._replayed(drafts, nodes) if self._is_captured_for(drafts) else self._walked(drafts, nodes)
        told, path, hidden = outcome.told, outcome.path, outcome.hidden
        for row in self.running:
            if told[row][-1]:
                raise ValueError(
                    f"the model's scores for row {row} after {len(self.tokens[row])} tokens are NaN"
                    f"{'' if self.seeds is None else ', or leave no token to sample'}: check its weights, its dtype and the "
                    "logits processors; the cache still holds the tokens before"
                )
        for row in list(self.running):
            count, kept = told[row][-3:-1]
            # Drafts from the device may be deeper than what the row may still get.
            count = min(count, self.room[row])
            kept = self._stopped(row, told[row][:kept])
            if self.plan.stops is not None:
                path[row, kept:] = -1
            if hidden is not None and not self.drafts_on_device:
                self.hidden[row] = hidden[row, path[row, :kept].long()]
            self._emit(row, told[row][:kept], count - 1, outcome)
            self.statistics.add_step(drafts[row].tree.depths if row in drafts else self.shape.depths, count - 1, kept)
        if self.plan.stops is not None:
            self.verifier.commit(path)
        if self.statistics.forwards == 0:
            self.statistics.first_step_seconds = time.perf_counter() - started
        self.statistics.forwards += 1
        self.statistics.draft_seconds += drafted - started
        self.statistics.verify_seconds += time.perf_counter() - drafted

    def _capture(self) -> None:
        """Ask the verifier for whole steps, if nothing in the plan has to be decided on the host."""
        plan, capture = self.plan, getattr(self.verifier, "capture", None)
        needs_host = plan.keeps_scores or plan.keeps_logits or plan.stops is not None
        if capture is None or needs_host or (plan.processors and not (plan.seeds and plan.processors_run_on_device)):
            return
        levels = 0 if plan.seeds is None else min(self.verifier.max_nodes, 1 + len(plan.widths or range(DEEPEST)))
        on_device = self.drafter if plan.widths and getattr(self.drafter, "captured", None) is not None else None
        if plan.seeds is not None and getattr(on_device, "sample", True):
            on_device = None
        self.captured = capture(Decision(levels, tuple(plan.processors)), len(plan.eos), on_device, plan.widths)
        if self.captured is None:
            return
        self.captured.begin(plan.eos, plan.seeds)
        if self.captured.drafting is not None:
            self.drafts_on_device = True
            self.captured.drafting.begin(self._request())

    def _is_captured_for(self, drafts: dict[int, Draft]) -> bool:
        if self.captured is None or self.seeds is None or self.drafts_on_device:
            return self.captured is not None
        is_drawn = any(draft.probabilities is not None for draft in drafts.values())
        return not is_drawn and all(max(draft.tree.depths) < self.captured.levels for draft in drafts.values())

    def _replayed(self, drafts: dict[int, Draft], nodes: Tensor) -> _Outcome:
        """Run a whole step as one graph."""
        assert self.captured is not None
        rows = range(len(self.tokens))
        trees = [drafts[row].tree if row in drafts else None for row in rows]
        room = [self.room[row] if row in self.running else 0 for row in rows]
        told = self.captured(self.verifier.cache, trees, nodes, room, list(map(len, self.tokens)))  # type: ignore[attr-defined]
        return _Outcome(told, self.captured.path, self.captured.hidden, [], None)

    def _walked(self, drafts: dict[int, Draft], nodes: Tensor) -> _Outcome:
        """Verify, decide from the logits, and commit unless the user's criteria have to be asked first."""
        trees = [drafts[row].tree if row in drafts else None for row in range(len(self.tokens))]
        logits, hidden = self.verifier.verify(trees, nodes)
        encoding, positions = self.verifier.encoding, list(map(len, self.tokens))
        given = logits, nodes.to(logits.device), encoding, drafts, self.prefixes, self.seeds, positions
        walk, is_nan = decide_on_host(self.plan, *given)
        room = torch.tensor(self.room, device=logits.device)
        path, report = settle(walk.path, walk.emitted, walk.count, is_nan, room, self.eos, encoding)
        if self.plan.stops is None:
            self.verifier.commit(path)
        return _Outcome(report.tolist(), path, hidden, walk.scores, logits)

    def _drafts(self) -> dict[int, Draft]:
        drafts = checked_drafts(self.drafter, self._request(), self.verifier.vocab_size)
        return dict(zip(self.running, drafts, strict=True))

    def _request(self) -> DraftRequest:
        sampling = None
        if self.seeds is not None:
            positions = torch.tensor([len(self.tokens[row]) for row in self.running], device=self.seeds.device)
            sampling = PlannedSampling(self.plan, self.seeds[self.running], positions)
        hidden = None
        if getattr(self.drafter, "wants_hidden_states", False):
            hidden = [self.hidden.get(row, self._no_hidden()) for row in self.running]
        return DraftRequest(
            rows=list(self.running),
            tokens=[list(self.tokens[row]) for row in self.running],
            room=[self.room[row] for row in self.running],
            max_nodes=self.verifier.max_nodes,
            widths=self.plan.widths,
            node_budget=self.plan.node_budget,
            hidden_states=hidden,
            held=[self.plan.held[row] for row in self.running],
            sampling=sampling,
            vocab_size=self.verifier.vocab_size,
        )

    def _no_hidden(self) -> Tensor:
        known = next(iter(self.hidden.values()), None)
        return torch.empty(0, 0 if known is None else known.shape[1], device=self.verifier.device)

    def _stopped(self, row: int, new: list[int]) -> int:
        """Return how many of the ``new`` tokens come before the user's criteria stop the row, the stopping one included."""
        if self.plan.stops is not None:
            for count in range(1, len(new) + 1):
                if self.plan.stops(row, self.prefixes[row] + new[:count]):
                    self.room[row] = count
                    return count
        return len(new)

    def _emit(self, row: int, new: list[int], accepted: int, outcome: _Outcome) -> None:
        self.tokens[row] += new
        self.prefixes[row] += new
        self.decoded.tokens[row] += new
        self.room[row] -= len(new)
        if self.plan.keeps_scores:
            self.decoded.scores[row] += [outcome.scores[level][row] for level in range(len(new))]
        if self.plan.keeps_logits:
            assert outcome.logits is not None
            nodes = outcome.path[row, : len(new)].long()
            self.decoded.logits[row] += list(outcome.logits[row, nodes].float())
        if self.room[row] <= 0 or new[-1] in self.plan.eos:
            self.running.remove(row)
        if self.plan.on_tokens is not None:
            self.plan.on_tokens(row, new, min(accepted, len(new)))
