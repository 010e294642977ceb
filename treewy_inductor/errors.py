"""Errors that a compile may end with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treewy_inductor.records import Refused


class UnprovenRecurrence(RuntimeError):
    """A graph that reads a TreeCache holds a recurrence or convolution that could not be proven, so it was not compiled.

    Compiled as it stands, it would treat the tree as a chain and write wrong states.

    Attributes:
        refusals: one record for each place that was refused, with node, source line and reason.
    """

    def __init__(self, refusals: Sequence[Refused]) -> None:
        self.refusals = list(refusals)
        places = "\n".join(f"  {refusal.sentence()}" for refusal in self.refusals)
        super().__init__(
            f"{len(self.refusals)} of the places where this model reads its TreeCache could not be proven to be a recurrence "
            f"that a tree can be verified with, so the graph was not compiled:\n{places}\n"
            "Change the named lines, or use the model with its ordinary cache. docs/refusals.md explains how to read this"
        )
