"""What the decoding loop is given and what it returns.

B rows   N nodes of a verification   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.target_scores import Processor, Reads
from treewy_inductor.tree import DraftTree


class Verifier(Protocol):
    """The target model with a cache of ``rows`` rows, each holding some committed tokens."""

    rows: int
    max_nodes: int
    vocab_size: int
    device: torch.device
    encoding: TreeEncoding

    def prefill(self, prompts: dict[int, list[int]]) -> dict[int, Tensor]:
        """Append tokens to rows and commit them; return their hidden states ``[tokens, hidden]`` if these are wanted."""

    def verify(self, trees: Sequence[DraftTree | None], tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits ``[B, N, V]`` and, if wanted, hidden states ``[B, N, hidden]`` of ``tokens`` ``[B, N]``."""

    def commit(self, path: Tensor) -> None:
        """Keep the nodes of ``path`` ``[B, N]`` int32, -1 after each row's last one, and forget the others."""


@dataclass
class DecodingPlan:
    """What to decode and when to stop.

    Args:
        prompts: tokens of each row without padding, at least one.
        held: how many of them the verifier's rows hold already.
        room: the most tokens each row may get.
        eos: tokens that end a row.
        widths, node_budget: passed to the drafter.
        seeds: one a row to sample, None for greedy decoding.
        processors, reads: see :class:`TargetScores`; ``prefixes`` are each row's tokens as these shall see them.
        processors_run_on_device: whether they are tensor work of fixed shapes that a CUDA graph can hold.
        stops: ``(row, tokens as the processors see them) -> bool``, asked after every token.
        on_tokens: called with the row, its new tokens and how many of them were accepted drafts, in order.
        keeps_scores, keeps_logits: whether to return the scores and raw logits that decided each token.
    """

    prompts: list[list[int]]
    held: list[int]
    room: list[int]
    eos: list[int] = field(default_factory=list)
    widths: tuple[int, ...] | None = None
    node_budget: int | None = None
    seeds: list[int] | None = None
    processors: Sequence[Processor] = ()
    reads: Reads = Reads.SCORES
    processors_run_on_device: bool = False
    prefixes: list[list[int]] | None = None
    stops: Callable[[int, list[int]], bool] | None = None
    on_tokens: Callable[[int, list[int], int], None] | None = None
    keeps_scores: bool = False
    keeps_logits: bool = False


@dataclass
class Decoded:
    """Per row the emitted tokens and, where kept, the ``[V]`` scores and logits that decided each."""

    tokens: list[list[int]]
    scores: list[list[Tensor]]
    logits: list[list[Tensor]]
