"""Samples of sides that were timed in turns: their quantiles, and how far a side wandered from turn to turn.

A median can be trusted if the middle of the samples stays where it is. So each turn's lower quartile, median and upper quartile
are compared with those of the other turns: the largest range of the three, as a share of the median of all, is the side's
``drift``. The same rule holds for every side, and of two measurements the one counts in which the worst side drifted less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

QUANTILES = {"p10": 0.1, "p25": 0.25, "us": 0.5, "p75": 0.75, "p90": 0.9}


class Side(NamedTuple):
    """What the turns of one side say: ``quantiles`` of all samples by name, medians of the turns in order, and the drift."""

    quantiles: dict[str, float]
    medians: list[float]
    drift: float

    @classmethod
    def of(cls, turns: Sequence[Sequence[float]]) -> Side:
        """Return what ``turns``, none of which is empty, say."""
        together = [sample for turn in turns for sample in turn]
        quantiles = {name: float(np.quantile(together, share)) for name, share in QUANTILES.items()}
        quarters = [[float(np.quantile(turn, share)) for turn in turns] for share in (0.25, 0.5, 0.75)]
        drift = max(max(each) - min(each) for each in quarters) / quantiles["us"]
        return cls(quantiles, quarters[1], drift)
