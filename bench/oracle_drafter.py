"""Drafts that are right with a chosen probability, at the price of a real prediction layer, for models of random weights.

The tokens come from a text that is known: at each level the first sibling is right with probability ``chance``, decided by a
hash of the position, and the others are wrong. The prediction layer drafts too; its tokens are thrown away.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treewy_inductor.models.mtp_drafter import MtpDrafter
from treewy_inductor.models.mtp_on_device import MtpOnDevice
from treewy_inductor.models.multi_token_prediction import MultiTokenPrediction
from treewy_inductor.sampling import uniform
from treewy_inductor.tree import DraftTree


def chance_of(widths: Sequence[int], results: Path) -> float:
    """Return the chance a level at which trees of ``widths`` have the accept length that was measured on the shipped model."""
    shapes = json.loads((results / "accept_length.json").read_text())["shapes"]
    wanted = shapes[",".join(map(str, widths))]["accept_length"]
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        low, high = (chance, high) if sum(chance**d for d in range(len(widths) + 1)) < wanted else (low, chance)
    return low


class OracleDrafter(MtpDrafter):
    """See the module; only for captured steps of one row.

    Args:
        model: the target.
        start: tokens of its prompt.
        chance: of a level to hold the right token.
    """

    def __init__(self, model: Any, start: int, chance: float) -> None:
        super().__init__(MultiTokenPrediction(model).eval())
        self.start, self.chance = start, chance
        self.vocabulary = model.config.get_text_config().vocab_size
        self.text = torch.zeros(4096, dtype=torch.int64, device=model.device)

    def know(self, text: list[int]) -> None:
        """Draft from ``text``, prompt included, from now on."""
        self.text[: len(text)] = torch.tensor(text)

    def captured(self, rows: int, places: int, widths: Sequence[int]) -> MtpOnDevice:
        return _OracleOnDevice(self, rows, places, widths)


class _OracleOnDevice(MtpOnDevice):
    def __init__(self, oracle: OracleDrafter, rows: int, places: int, widths: Sequence[int]) -> None:
        super().__init__(MtpDrafter(oracle.prediction), rows, places, widths)
        self._oracle = oracle
        shape, device = DraftTree.from_widths(widths), oracle.text.device
        self._depth = torch.tensor(shape.depths, device=device)
        ranks = [shape.children(parent).index(t) if parent >= 0 else 0 for t, parent in enumerate(shape.parents)]
        self._sibling = torch.tensor(ranks, device=device)

    def draft(self, roots: Tensor, lengths: Tensor) -> Tensor:
        drafted, oracle = super().draft(roots, lengths), self._oracle
        place = lengths[:, None] + self._depth
        right = oracle.text[place]
        is_right = (uniform(torch.full_like(place, 7), place, 0) < oracle.chance) & (self._sibling == 0)
        wrong = (right + 1 + self._sibling) % oracle.vocabulary
        known = torch.where(is_right, right, wrong)
        # The layer's tokens are looked at, though never taken: they are not negative.
        return torch.where(drafted < 0, drafted, torch.where(self._depth == 0, roots[:, None], known))
