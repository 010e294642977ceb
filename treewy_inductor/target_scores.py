"""The target's scores after logits processors, at the nodes that an acceptance walk visits.

Processors are those of transformers, or any callables ``(input_ids [R, length], scores [R, V]) -> scores [R, V]``. A node's
``input_ids`` are what plain decoding would pass there: the row's prompt as it was given, what was generated, and the tokens on
the path to the node. Processors that only read scores run once for all rows; the others once per row, since rows of a batch
differ in length.

    B rows   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor

Processor = Callable[[Tensor, Tensor], Tensor]


class Reads(Enum):
    """What a list of processors looks at besides the scores of a row."""

    SCORES = "nothing"
    ROW = "the row's tokens"
    BATCH = "the row's tokens and which row of the batch it is"


class TargetScores:
    """Scores of visited nodes for one step of a batch.

    Args:
        processors: applied in this order.
        reads: the most that any of them looks at.
        prefixes: per row all tokens up to the root, ``[length]`` int64, or None in a row that does not run.
    """

    def __init__(self, processors: Sequence[Processor], reads: Reads, prefixes: Sequence[Tensor | None]) -> None:
        self.processors, self.reads, self.prefixes = processors, reads, prefixes

    def __call__(self, logits: Tensor, emitted: Tensor) -> Tensor:
        """Return ``[B, V]`` float32 scores of ``logits`` ``[B, V]`` after tokens ``emitted`` ``[B, level]`` below the root."""
        scores = logits.float().clone()
        if not self.processors:
            return scores
        if self.reads is Reads.SCORES:
            return self._processed(emitted, scores)
        return torch.stack(
            [
                scores[row] if prefix is None else self._processed_row(row, torch.cat([prefix, emitted[row]]), scores[row])
                for row, prefix in enumerate(self.prefixes)
            ]
        )

    def _processed_row(self, row: int, tokens: Tensor, scores: Tensor) -> Tensor:
        if self.reads is Reads.ROW:
            return self._processed(tokens[None], scores[None])[0]
        rows = len(self.prefixes)
        return self._processed(tokens.repeat(rows, 1), scores.repeat(rows, 1))[row]

    def _processed(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for processor in self.processors:
            scores = processor(input_ids, scores)
        return scores
