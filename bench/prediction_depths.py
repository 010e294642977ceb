"""The prediction layer unrolled to three depths over a training text, as drafting a chain of three applies it.

Anchor i stands for the text after which is drafted: t_0 .. t_i are known to the model, t_{i+1} was just chosen. Depth d
reads t_{i+d} and the output of depth d - 1 at anchor i, and predicts t_{i+1+d}. It sees what a drafter's cache holds then:
the depth-1 keys of the anchors up to i, and at anchor i those of the depths between.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treewy_inductor.models.multi_token_prediction import MultiTokenPrediction

DEPTHS = 3


class AppendedKeysValues:
    """Keys and values of all calls so far, one behind the other; gradients flow through."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.append(keys)
        self.values.append(values)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)


def unrolled(prediction: MultiTokenPrediction, tokens: Tensor, hidden_states: Tensor) -> list[Tensor]:
    """Return per depth d = 1.. the logits ``[B, A, vocab]`` of t_{i+1+d}, for the anchors i < A = T - DEPTHS.

    Args:
        tokens: ``[B, T]`` int64. hidden_states: ``[B, T, D]``, what the model's head reads.
    """
    anchors = tokens.shape[1] - DEPTHS
    causal = torch.ones(anchors, anchors, dtype=torch.bool, device=tokens.device).tril()
    own = torch.eye(anchors, dtype=torch.bool, device=tokens.device)
    anchor = torch.arange(anchors, device=tokens.device)
    stored, state, logits = AppendedKeysValues(), hidden_states[:, :anchors], []
    for depth in range(1, DEPTHS + 1):
        mask = torch.cat([causal] + [own] * (depth - 1), dim=1)[None, None].expand(tokens.shape[0], -1, -1, -1)
        positions = (anchor + depth)[None].expand(tokens.shape[0], -1)
        state = prediction(tokens[:, depth : depth + anchors], state, positions, mask, stored)
        logits.append(prediction.logits(state))
    return logits


def distillation_losses(model_logits: Tensor, drafted: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return per depth the cross entropy to the model's own distribution, and how often both have the same first choice.

    A draft is accepted when it is what the model itself would say, right or wrong; so the model teaches, not the text.

    Args:
        model_logits: ``[B, T, vocab]``; position j predicts t_{j+1}. drafted: as :func:`unrolled` returns.
    """
    losses, agreements = [], []
    for depth, logits in enumerate(drafted, start=1):
        teacher = model_logits[:, depth : depth + logits.shape[1]].detach().float()
        losses.append(F.cross_entropy(logits.float().flatten(0, 1), teacher.softmax(-1).flatten(0, 1)))
        agreements.append((logits.detach().argmax(-1) == teacher.argmax(-1)).float().mean())
    return losses, agreements
