"""What a generation did: steps, accepted drafts by depth, and where the time went."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass
class GenerationStatistics:
    """Counted over all rows of one or more generations; pass one object to several to add them up.

    Args:
        steps: verifications of a row: a batch's step counts once for each row that ran in it.
        forwards: runs of the compiled model; a batch's step counts once.
        tokens: emitted tokens.
        drafted: nodes verified besides the roots.
        accepted_by_depth: ``[d]`` is how many steps accepted a draft at depth ``d + 1``.
        offered_by_depth: ``[d]`` is how many steps had a draft at that depth at all.
        tokens_by_step: how many steps emitted that many tokens.
        prefill_seconds: wall clock until the first step; with CUDA graphs it includes compiling and capturing, if nothing
            fitting was captured before.
        draft_seconds, verify_seconds: likewise; verifying includes accepting and committing, and drafting in the same graph.
        first_step_seconds: of the first step, which otherwise compiles.
    """

    steps: int = 0
    forwards: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    offered_by_depth: list[int] = field(default_factory=list)
    tokens_by_step: dict[int, int] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    first_step_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens a row gets per verification, the bonus included: the accept length of the papers."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens of all rows per second of drafting and verifying, prompts not counted."""
        seconds = self.draft_seconds + self.verify_seconds
        return self.tokens / seconds if seconds else 0.0

    @property
    def later_step_seconds(self) -> float:
        """Seconds of drafting and verifying in a step after the first one, on average."""
        return max(0.0, self.draft_seconds + self.verify_seconds - self.first_step_seconds) / max(1, self.forwards - 1)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """For each depth the share of steps with a draft there in which one was accepted."""
        return [
            accepted / offered if offered else 0.0
            for accepted, offered in zip(self.accepted_by_depth, self.offered_by_depth, strict=True)
        ]

    def add_step(self, depths: list[int], accepted: int, emitted: int) -> None:
        """Count one row's step: the depths of its tree's nodes, how many drafts were accepted, how many tokens came out."""
        self.steps += 1
        self.tokens += emitted
        self.drafted += len(depths) - 1
        self.tokens_by_step[emitted] = self.tokens_by_step.get(emitted, 0) + 1
        for per_depth, reached in ((self.offered_by_depth, max(depths)), (self.accepted_by_depth, accepted)):
            for d in range(max(depths)):
                if d == len(per_depth):
                    per_depth.append(0)
                per_depth[d] += d < reached

    def to_json(self) -> str:
        """Return the figures as one JSON line."""
        return json.dumps(
            {
                "tokens": self.tokens,
                "steps": self.steps,
                "tokens_per_step": round(self.tokens_per_step, 4),
                "acceptance_by_depth": [round(share, 4) for share in self.acceptance_by_depth],
                "prefill_seconds": round(self.prefill_seconds, 4),
                "draft_seconds": round(self.draft_seconds, 4),
                "verify_seconds": round(self.verify_seconds, 4),
            }
        )
