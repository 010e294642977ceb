"""Random choices that depend on a row's seed and on the position being decided, and on nothing else.

A number is the hash of (seed, position, stream): no generator is advanced, so neither the batch around a row nor how many
drafts were rejected changes what is drawn for a position. With a deterministic tree the text of a seed is therefore the text
that plain sampling with that seed gives, token for token.

    B rows   N nodes   V vocabulary   R rows of a drafter's logits
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_TARGET, _ACCEPT, _DRAFT = 0, 1 << 20, 1 << 32


def _mixed(z: Tensor) -> Tensor:
    """Return the finalizer of splitmix64 of ``z`` int64: every input bit changes half of the output bits.

    Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, figure 19.
    """
    # Products wrap around; the masks make the arithmetic shifts logical ones.
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def _wrapped(number: int) -> int:
    """Return ``number`` as int64 arithmetic that wraps around would."""
    return (number + 2**63) % 2**64 - 2**63


def uniform(seeds: Tensor, positions: Tensor, streams: Tensor | int) -> Tensor:
    """Return a number in [0, 1) for each (seed, position, stream), the same one whenever it is asked for.

    Args:
        seeds, positions, streams: int64, broadcast against each other.

    Returns:
        float64, a multiple of ``2 ** -53``.
    """
    golden = -0x61C8864680B583EB
    z = _mixed(seeds + golden)
    z = _mixed(z + positions * golden)
    # A number on the host is multiplied there, modulo 2 ** 64 as on the device, so that no copy to the device is needed.
    step = (streams + 1) * golden if isinstance(streams, Tensor) else _wrapped((streams + 1) * golden)
    z = _mixed(z + step)
    return ((z >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def choose(probabilities: Tensor, u: Tensor) -> Tensor:
    """Return the token at which the cumulated ``probabilities`` first exceed ``u``; never one of probability 0.

    Args:
        probabilities: ``[..., V]`` float64, at least 0, of any positive sum.
        u: ``[...]`` float64 in [0, 1).

    Returns:
        ``[...]`` int64.
    """
    cumulated = probabilities.cumsum(-1)
    total = cumulated[..., -1:]
    # u * total may round up to the total, which no cumulated probability exceeds.
    threshold = torch.minimum(u[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, threshold, right=True)[..., 0].clamp(max=probabilities.shape[-1] - 1)


def draw_without_replacement(probabilities: Tensor, u: Tensor) -> Tensor:
    """Draw tokens one after the other, each time from what is left of ``probabilities``.

    Args:
        probabilities: ``[R, V]`` float64.
        u: ``[R, W]`` float64 in [0, 1), one a draw.

    Returns:
        ``[R, W]`` int64 tokens; -1 once no token of positive probability is left.
    """
    left = probabilities.clone()
    drawn = []
    for numbers in u.unbind(1):
        token = choose(left, numbers)
        drawn.append(torch.where(left.sum(-1) > 0, token, -1))
        left.scatter_(1, token[:, None], 0)
    return torch.stack(drawn, 1)


class Randomness(Protocol):
    """Where the acceptance rules get their random decisions from, all rows at once."""

    def choose(self, probabilities: Tensor, level: int) -> Tensor:
        """Return a token ``[B]`` drawn from ``probabilities`` ``[B, V]`` for the position ``level`` below the root."""

    def accept(self, probability: Tensor, level: int, child: int) -> Tensor:
        """Return ``[B]`` bool, true with ``probability`` ``[B]``, for the ``child``-th draft of that position."""


class SeededRandomness:
    """The decisions of one step: each position of a row is decided by numbers of its own.

    Args:
        seeds: ``[B]`` int64.
        positions: ``[B]`` int64, how many tokens each row holds, padding not counted: the position the root decides.
    """

    def __init__(self, seeds: Tensor, positions: Tensor) -> None:
        self.seeds, self.positions = seeds, positions

    def choose(self, probabilities: Tensor, level: int) -> Tensor:
        return choose(probabilities, uniform(self.seeds, self.positions + level, _TARGET))

    def accept(self, probability: Tensor, level: int, child: int) -> Tensor:
        return uniform(self.seeds, self.positions + level, _ACCEPT + child) < probability


def draft_uniform(seeds: Tensor, positions: Tensor, draws: Tensor) -> Tensor:
    """Return the numbers ``[R]`` for draw ``draws[r]`` of the tree drafted for a row that holds ``positions[r]`` tokens."""
    return uniform(seeds, positions, _DRAFT + draws)
