"""The steps of a generation as CUDA graphs: the host copies its part in once, replays, and reads what was decided once.

    CapturedVerification   derive the tree, verify                                 logits stay on the device
    CapturedDecoding       draft (if on the device), derive, verify, decide, commit

A row that is not asked for anything has room 0 and no nodes: it commits nothing, so rows end without another capture.
Neither holds the cache or the model: their buffers are the graph's, and whoever replays keeps them alive.

    B rows   N nodes of a verification   V vocabulary   D hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from treewy_inductor import graph_capture
from treewy_inductor.drafting import CapturedDrafting
from treewy_inductor.step_decisions import Decision, settle
from treewy_inductor.tree import INERT, DraftTree

Verify = Callable[[dict[str, Any]], tuple[Tensor, Tensor | None]]


class _Given:
    """What the host gives to a step: one row of int64 for each row of the batch, copied in one go."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.host = torch.zeros(rows, columns, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.device = self.host.to(device)

    def copy(self) -> None:
        # The host waits for the results of every step, so it never writes here while a copy is under way.
        self.device.copy_(self.host, non_blocking=True)


class CapturedVerification:
    """Derive the trees of a batch and verify them, without deciding anything.

    Args:
        cache: a TreeCache on a CUDA device.
        verify: from the cache's inputs to logits ``[B, N, V]`` and hidden states ``[B, N, D]`` or None.
        pool: memory pool to share with other graphs.
    """

    def __init__(self, cache: Any, verify: Verify, pool: Any = None) -> None:
        nodes = self._nodes = cache.max_nodes
        self._given = _Given(cache.rows, 2 * nodes, cache.device)
        self._given.host[:, :nodes] = INERT
        self._given.copy()
        given = self._given.device

        def run() -> tuple[Tensor, Tensor | None]:
            cache.set_tree(given[:, :nodes].int())
            return verify(cache.inputs(given[:, nodes:]))

        self._graph, (self.logits, self.hidden) = graph_capture.capture_graph(run, pool)
        self.pool = self._graph.pool()

    def __call__(self, cache: Any, trees: Sequence[DraftTree | None], tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits and hidden states, overwritten by the next call; ``tokens`` ``[B, N]`` int64 on the host."""
        self._given.host[:, : self._nodes] = cache.parents_of(trees)
        self._given.host[:, self._nodes :] = tokens
        cache.check_tokens(tokens)
        self._given.copy()
        self._graph.replay()
        cache.has_tree = True
        return self.logits, self.hidden


class CapturedDecoding:
    """A whole step of decoding.

    Args:
        cache: a TreeCache on a CUDA device.
        verify: as for :class:`CapturedVerification`; with hidden states if ``drafting`` is given.
        decision: how drafts are accepted.
        ends: how many end tokens there is room for.
        drafting: drafts on the device; None: the host gives trees.
        pool: memory pool to share with other graphs.

    Attributes:
        path, hidden: ``[B, N]`` int32 and ``[B, N, D]`` or None, of the last step; overwritten by the next.
    """

    def __init__(
        self,
        cache: Any,
        verify: Verify,
        decision: Decision,
        ends: int,
        drafting: CapturedDrafting | None = None,
        pool: Any = None,
    ) -> None:
        nodes = self._nodes = cache.max_nodes
        self.drafting, self.levels = drafting, decision.levels
        self._given = _Given(cache.rows, 2 * nodes + 2, cache.device)
        self._given.host[:, :nodes] = INERT
        self._given.copy()
        self._eos = torch.full((ends,), -1, dtype=torch.int64, device=cache.device)
        self._seeds = torch.zeros(cache.rows, dtype=torch.int64, device=cache.device)
        given, eos, seeds = self._given.device, self._eos, self._seeds

        def run() -> tuple[Tensor, Tensor, Tensor | None]:
            parents, tokens = given[:, :nodes].int(), given[:, nodes : 2 * nodes]
            room, positions = given[:, -2], given[:, -1]
            if drafting is not None:
                tokens = drafting.draft(tokens[:, 0], cache.lengths)
                shape = torch.nn.functional.pad(drafting.parents, (0, nodes - len(drafting.parents)), value=INERT)
                parents = torch.where(room[:, None] > 0, shape, INERT)
            cache.set_tree(parents)
            logits, hidden = verify(cache.inputs(tokens))
            accepted = decision.decide(logits, cache.tokens, cache.encoding, seeds, positions)
            path, report = settle(*accepted, room, eos, cache.encoding)
            cache.commit_tensors(path)
            if drafting is not None:
                assert hidden is not None
                drafting.take(hidden, path, accepted[1], report[:, -2], cache.lengths)
            return report, path, hidden

        self._graph, (self._report, self.path, self.hidden) = graph_capture.capture_graph(run, pool)
        self.pool = self._graph.pool()

    def begin(self, eos: Sequence[int], seeds: Sequence[int] | None) -> None:
        """Prepare for another generation with these end tokens and, for sampling, seeds."""
        self._eos.fill_(-1)
        self._eos[: len(eos)] = torch.tensor(list(eos), dtype=torch.int64)
        if seeds is not None:
            self._seeds.copy_(torch.tensor(list(seeds)))

    def __call__(
        self,
        cache: Any,
        trees: Sequence[DraftTree | None],
        tokens: Tensor,
        room: Sequence[int],
        positions: Sequence[int],
    ) -> list[list[int]]:
        """Run one step and return what it decided: the rows of :func:`settle`'s report.

        Args:
            cache: the one that was captured.
            trees: one a row, None in a row that does not run; not looked at if drafts come from the device.
            tokens: ``[B, N]`` int64 on the host; of drafts from the device the roots alone.
            room: the most tokens each row may still get, 0 in a row that does not run.
            positions: how many tokens each row holds, its root included.

        Raises:
            ValueError: if a row has no room left for a tree; nothing has run then.
        """
        host = self._given.host
        if self.drafting is None:
            host[:, : self._nodes] = cache.parents_of(trees)
        host[:, self._nodes : 2 * self._nodes] = tokens
        host[:, -2:] = torch.tensor([room, positions]).T
        cache.check_tokens(tokens)
        self._given.copy()
        self._graph.replay()
        cache.has_tree = True
        told = self._report.tolist()
        cache.note_commit(max(row[-2] for row in told))
        return told
