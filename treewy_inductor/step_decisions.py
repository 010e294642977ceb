"""What a step decides from a verification's logits, on the device alone: the accepted path, and where each row ends.

    greedy, no processors          most_likely
    sampled, drafts not drawn      a walk that samples each position and looks whether a draft holds the sample
    the rest                       the decoding loop's own walk, with what it needs from the host

All of it is tensor work of fixed shapes, so that a CUDA graph can hold it together with the verification.

    B rows   N nodes   V vocabulary   D levels of the deepest tree   E end tokens
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treewy_inductor.acceptance import accept_matching
from treewy_inductor.acceptance_walk import Walk, match_sample, walk_tree
from treewy_inductor.compile_per_shape import compile_per_shape
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.sampling import SeededRandomness
from treewy_inductor.target_scores import Processor, Reads, TargetScores


def _most_likely(
    logits: Tensor, tokens: Tensor, parents: Tensor, ancestors: Tensor, depth: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    best, predicted = logits.max(-1)
    path, _, count = accept_matching(predicted, tokens, parents, ancestors, depth)
    node = path.clamp(min=0).long()
    is_nan = (best.gather(1, node).isnan() & (path >= 0)).any(1)
    return path, predicted.gather(1, node), count, is_nan


def _settle(path: Tensor, emitted: Tensor, count: Tensor, is_nan: Tensor, room: Tensor, eos: Tensor) -> tuple[Tensor, Tensor]:
    step = torch.arange(emitted.shape[1], device=path.device)
    is_end = (emitted[..., None] == eos).any(-1) & (step < count[:, None])
    until_end = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, emitted.shape[1])
    kept = torch.minimum(torch.minimum(count, room), until_end)
    kept = torch.where(is_nan, 0, kept)
    node = torch.arange(path.shape[1], device=path.device)
    cut = torch.where(node < kept[:, None], path, -1)
    return cut, torch.cat([emitted, count[:, None], kept[:, None], is_nan[:, None]], 1)


_most_likely_compiled = compile_per_shape(_most_likely)
_settle_compiled = compile_per_shape(_settle)


def most_likely(logits: Tensor, tokens: Tensor, encoding: TreeEncoding) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``path, emitted, count, is_nan`` of greedy decoding without processors.

    Args:
        logits: ``[B, N, V]``; tokens: ``[B, N]`` int64.

    Returns:
        path: ``[B, N]`` int32, accepted nodes from the root down, then -1.
        emitted: ``[B, N]`` int64, the token after each accepted node, the last of them the bonus; then anything.
        count: ``[B]`` int64, accepted nodes; is_nan: ``[B]`` bool, whether a score that was decisive is NaN.
    """
    decide = _most_likely_compiled if encoding.compiled else _most_likely
    return decide(logits, tokens, encoding.parents, encoding.ancestors, encoding.depth)


def settle(
    path: Tensor, emitted: Tensor, count: Tensor, is_nan: Tensor, room: Tensor, eos: Tensor, encoding: TreeEncoding
) -> tuple[Tensor, Tensor]:
    """Return the path cut at the end of each row, and what the host has to know, ``[B, columns of emitted + 3]``.

    A row ends with its first end token or when its room is used up; a row whose scores are NaN commits nothing. The last three
    columns are ``count``, how many of these tokens are kept, and ``is_nan``.

    Args:
        room: ``[B]`` int64, the most tokens each row may still get.
        eos: ``[E]`` int64; -1 is no token and ends nothing.
    """
    return (_settle_compiled if encoding.compiled else _settle)(path, emitted, count, is_nan, room, eos)


def is_unfit(walk: Walk, is_sampled: bool) -> Tensor:
    """Return ``[B]`` bool, whether a score that the walk looked at is NaN, or no token is left that could be sampled."""
    # The largest is NaN if any is; and a distribution has a finite one.
    best = torch.stack([scores.amax(1) for scores in walk.scores], 1)
    seen = ~best.isfinite() if is_sampled else best.isnan()
    level = torch.arange(len(walk.scores), device=seen.device)
    return (seen & (level < walk.count[:, None])).any(1)


@dataclass(frozen=True)
class Decision:
    """How the steps of a generation decide when nothing has to be asked on the host.

    Args:
        levels: of the deepest tree that can be walked, 0 for greedy decoding, which takes any tree.
        processors: of scores alone; for sampling.
    """

    levels: int = 0
    processors: tuple[Processor, ...] = ()

    @property
    def key(self) -> Hashable:
        """What two decisions have in common that a recorded graph may serve both."""
        described: list[Any] = [(type(one).__name__, repr(sorted(vars(one).items()))) for one in self.processors]
        return self.levels, tuple(described)

    def decide(
        self, logits: Tensor, tokens: Tensor, encoding: TreeEncoding, seeds: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what :func:`most_likely` returns; ``emitted`` is ``[B, D]`` when sampling.

        Args:
            seeds, positions: ``[B]`` int64, as :class:`SeededRandomness` takes them.
        """
        if self.levels == 0:
            return most_likely(logits, tokens, encoding)
        target = TargetScores(self.processors, Reads.SCORES, ())
        rows = torch.arange(len(tokens), device=tokens.device)

        def score(node: Tensor, emitted: Tensor, level: int) -> Tensor:
            return target(logits[rows, node], emitted)

        rule = match_sample(tokens, encoding.parents, SeededRandomness(seeds, positions))
        walk = walk_tree(tokens, encoding.parents, self.levels, score, rule)
        return walk.path, walk.emitted, walk.count, is_unfit(walk, is_sampled=True)
