"""Draft trees with the model's own multi-token-prediction layer.

The layer reads the model's hidden state h_i and the token after it, t_{i+1}. What it computes for the last token is the root's,
and says what may follow it; applied to a drafted token and to the output m of the node above, it says what may follow that.
So all nodes of a level are one call, each attending to the committed tokens and to the nodes on its own path. Keys of
drafted tokens were computed from m; once tokens are accepted, theirs are computed anew from h.

A committed token's keys and values stand in the place of its position, from 1 on: the first token has no state before it, and
is read with zeros in that place while it is the root of a text that has no other token. Tokens that a given cache held before
are like tokens before the first: their states are not known, so the layer reads what came later.

    R rows of a request   T tokens of one call   S places attended over   D hidden size   F nodes of a level
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treewy_inductor.drafting import Draft, DraftRequest
from treewy_inductor.grow_tree import FrontierNode, grow_trees
from treewy_inductor.models.mtp_on_device import MtpOnDevice
from treewy_inductor.models.multi_token_prediction import MultiTokenPrediction
from treewy_inductor.models.ragged_keys_values import RaggedKeysValues
from treewy_inductor.models.transformers_api import uncompiled

# Tokens of a prompt in one call, which bounds the mask of a long one.
_CHUNK = 512


class MtpDrafter:
    """See the module.

    Args:
        prediction: the layer of the target model.
        max_depth: of a tree under a node budget; widths bring their own depth. The layer is applied to its own output
            from the second level on, however it was trained.
        sample: whether to draw tokens when the target samples. If False the most probable are taken, which is as lossless.
    """

    wants_hidden_states = True

    def __init__(self, prediction: MultiTokenPrediction, max_depth: int = 8, sample: bool = True) -> None:
        self.prediction, self.max_depth, self.sample = prediction, max_depth, sample
        self.begin(0)

    @classmethod
    def of(cls, model: Any, max_depth: int = 8, sample: bool = True) -> MtpDrafter:
        """Return the drafter of a model that was loaded from a checkpoint with a prediction layer.

        Raises:
            ValueError: if it was not.
        """
        return cls(MultiTokenPrediction.of(uncompiled(model)), max_depth, sample)

    @property
    def capture_key(self) -> int:
        """What tells this drafter's layer from others."""
        return id(self.prediction)

    def captured(self, rows: int, places: int, widths: Sequence[int]) -> MtpOnDevice:
        """Return the drafting of trees of ``widths`` without the host; see :class:`CapturedDrafting`."""
        return MtpOnDevice(MtpDrafter(self.prediction), rows, places, widths)

    def begin(self, batch_size: int) -> None:
        self.stored = RaggedKeysValues()
        self._held: dict[int, int] = {}
        # Per row the first place of a token that is read behind a state.
        self.first: dict[int, int] = {}

    @torch.no_grad()
    def draft(self, request: DraftRequest) -> list[Draft]:
        """Return one tree a row, in which siblings stand in the order of their probability.

        Raises:
            ValueError: if a row's hidden states are not those of its new tokens.
        """
        roots = self.read_accepted(request)
        lengths, first = [len(tokens) for tokens in request.tokens], [self.first[row] for row in request.rows]
        levels = _Levels(self.prediction, self.stored, request.rows, lengths, first, roots)

        def extend(frontier: list[FrontierNode]) -> Tensor:
            if frontier[0].depth > 0:
                levels.read(frontier)
            return self.prediction.logits(levels.outputs_of(frontier))

        return grow_trees(request, extend, max_depth=self.max_depth, sample=None if self.sample else False)

    def read_accepted(self, request: DraftRequest) -> Tensor:
        """Store the keys and values of the tokens accepted since the last request; return each root's m, ``[R, D]``."""
        weight = self.prediction.fc.weight
        start, hidden = [], []
        unseen = request.held or [0] * len(request.rows)
        for row, tokens, new, before in zip(request.rows, request.tokens, request.hidden_states or [], unseen, strict=True):
            held = self._held.get(row, before)
            expected = len(tokens) - 1 - held
            if len(new) != expected or (expected == 0 and row in self._held):
                raise ValueError(
                    f"row {row} has {len(new)} new hidden states for {expected} new tokens: the drafter needs those of all "
                    "tokens but the last, from what the cache held on"
                )
            # No state is known before the first token that is read; as a root it is read with zeros in that place.
            start.append(held + 1 if expected else held)
            hidden.append(new if expected else weight.new_zeros(1, weight.shape[0]))
            self._held[row] = len(tokens) - 1
            self.first.setdefault(row, before + 1)
        ids = [torch.tensor(tokens[first:]) for first, tokens in zip(start, request.tokens, strict=True)]
        outputs = self._in_chunks(request.rows, start, ids, hidden)
        last = torch.tensor([len(new) for new in hidden], device=weight.device) - 1
        return outputs[torch.arange(len(last), device=weight.device), last]

    def _in_chunks(self, rows: list[int], start: list[int], ids: list[Tensor], hidden: list[Tensor]) -> Tensor:
        """Run each row's new tokens, the first of them at ``start``; return m ``[R, T, D]``, padded behind shorter rows."""
        device = self.prediction.fc.weight.device
        tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
        states = torch.nn.utils.rnn.pad_sequence(hidden, batch_first=True)
        begin, row = torch.tensor(start, device=device)[:, None], torch.tensor(rows, device=device)
        seen_from = torch.minimum(begin, torch.tensor([self.first[row] for row in rows], device=device)[:, None])
        outputs = []
        for first in range(0, tokens.shape[1], _CHUNK):
            chunk = tokens[:, first : first + _CHUNK]
            place = begin + first + torch.arange(chunk.shape[1], device=device)
            size = max(start) + first + chunk.shape[1]
            key = torch.arange(size, device=device)
            mask = (key <= place[..., None]) & (key >= seen_from[..., None])
            self.stored.aim(row, place, size)
            outputs.append(self.prediction(chunk, states[:, first : first + _CHUNK], place, mask[:, None], self.stored))
        return torch.cat(outputs, 1)


class _Levels:
    """The drafted nodes of one request, read level by level.

    Args:
        lengths: tokens of each row, the root included.
        first: of each row, as :class:`MtpDrafter` keeps it.
        roots: ``[R, D]``, m of each root.
    """

    def __init__(
        self,
        prediction: MultiTokenPrediction,
        stored: RaggedKeysValues,
        rows: list[int],
        lengths: list[int],
        first: list[int],
        roots: Tensor,
    ) -> None:
        self.prediction, self.stored = prediction, stored
        self.rows = torch.tensor(rows, device=roots.device)
        self.lengths = torch.tensor(lengths, device=roots.device)
        self.seen_from = torch.minimum(self.lengths - 1, torch.tensor(first, device=roots.device))
        self.outputs, self.used = roots[:, None], 0
        self.column = {(entry, 0): 0 for entry in range(len(rows))}
        # For each node the places of its path below the root, counted from the first place behind the row's tokens.
        self.path: dict[tuple[int, int], list[int]] = {(entry, 0): [] for entry in range(len(rows))}

    def outputs_of(self, nodes: list[FrontierNode]) -> Tensor:
        """Return m ``[F, D]`` of nodes of the level that was read last, or of roots."""
        entry = torch.tensor([node.entry for node in nodes], device=self.rows.device)
        column = torch.tensor([self.column[node.entry, node.node] for node in nodes], device=self.rows.device)
        return self.outputs[entry, column]

    def read(self, frontier: list[FrontierNode]) -> None:
        """Read the nodes of the next level, each a child of one of the level before."""
        count = [0] * len(self.rows)
        entry, column, above, seen = [], [], [], []
        for node in frontier:
            entry.append(node.entry)
            column.append(count[node.entry])
            above.append(self.column[node.entry, node.parent])
            path = [*self.path[node.entry, node.parent], self.used + count[node.entry]]
            self.path[node.entry, node.node] = path
            seen += [(node.entry, count[node.entry], place) for place in path]
            count[node.entry] += 1
        self.column.update({(n.entry, n.node): c for n, c in zip(frontier, column, strict=True)})
        device, width = self.rows.device, max(count)
        at = torch.tensor([entry, column], device=device)
        tokens = torch.zeros(len(count), width, dtype=torch.int64, device=device)
        tokens[at[0], at[1]] = torch.tensor([node.token for node in frontier], device=device)
        states = self.outputs.new_zeros(len(count), width, self.outputs.shape[2])
        states[at[0], at[1]] = self.outputs[at[0], torch.tensor(above, device=device)]

        size = int(self.lengths.max()) + self.used + width
        key, length = torch.arange(size, device=device), self.lengths[:, None]
        mask = ((key < length) & (key >= self.seen_from[:, None]))[:, None].repeat(1, width, 1)
        r, t, place = torch.tensor(seen, device=device).T
        mask[r, t, self.lengths[r] + place] = True
        places = length + self.used + torch.arange(width, device=device)
        self.stored.aim(self.rows, places, size)
        positions = (self.lengths - 1 + frontier[0].depth)[:, None].expand(-1, width)
        self.outputs = self.prediction(tokens, states, positions, mask[:, None], self.stored)
        self.used += width
