"""A whole step of greedy speculative decoding as one CUDA graph: derive the tree, verify, accept, commit.

    step = treewy.CapturedStep(torch.compile(model, backend="treewy", fullgraph=True), cache)
    path, bonus, count = step(tree, tokens)

Everything the graph reads lies at fixed addresses: the parents, from which the tree's other tensors are derived inside the
graph, the tokens, and the cache. So trees, lengths and rows change between replays and nothing is captured again. The host
reads what it wants of the three results, once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from treewy_inductor.acceptance import greedy_accept
from treewy_inductor.graph_capture import capture_graph
from treewy_inductor.tree import INERT, DraftTree


class CapturedStep:
    """See the module.

    Args:
        model: compiled with ``backend="treewy"`` and without CUDA graphs of its own; called with what
            :meth:`TreeCache.inputs` returns, its output has ``logits`` ``[B, N, vocab]``.
        cache: a :class:`TreeCache` on a CUDA device; the graph reads and writes its buffers. It may hold tokens: while
            capturing all rows are idle, so nothing is committed.
        pool: memory pool to share with other graphs, as ``torch.cuda.graph`` takes it.

    Attributes:
        logits: ``[B, N, vocab]``, of the last step; overwritten by the next.
        captures: how often a graph was captured: 1.

    Raises:
        ValueError: if the cache is not on a CUDA device.
    """

    def __init__(self, model: Callable[..., Any], cache: Any, pool: Any = None) -> None:
        if cache.device.type != "cuda":
            raise ValueError(
                f"the cache is on {cache.device}, and a CUDA graph needs a CUDA device: call the compiled model, greedy_accept "
                "and TreeCache.commit one after the other"
            )
        self.cache, self._model = cache, model
        self._parents = torch.full_like(cache.encoding.parents, INERT)
        self._tokens = torch.zeros_like(cache.tokens)
        self.captures = 0
        self._graph, (self.logits, self.path, self.bonus, self.count) = capture_graph(self.run_uncaptured, pool)
        self.captures += 1

    def __call__(self, tree: DraftTree | Sequence[DraftTree | None] | Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Verify ``tokens`` as the nodes of ``tree``, commit the accepted path, and return it.

        Args:
            tree: as :meth:`TreeCache.set_tree` takes it.
            tokens: ``[B, N']`` int64, ``N' <= max_nodes``.

        Returns:
            path, bonus, count as :func:`greedy_accept` returns them; overwritten by the next step.

        Raises:
            ValueError: if the tree or the tokens do not fit, or a row has no room left; nothing has run then.
        """
        parents = self.cache.parents_of(tree)
        self.cache.check_tokens(tokens)
        self._parents.copy_(parents, non_blocking=True)
        self._tokens[:, : tokens.shape[1]].copy_(tokens, non_blocking=True)
        self._graph.replay()
        self.cache.note_commit(tokens.shape[1])
        return self.path, self.bonus, self.count

    def run_uncaptured(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run the step on what was copied in last, launched kernel by kernel; return logits, path, bonus, count."""
        cache = self.cache
        cache.set_tree(self._parents)
        with torch.no_grad():
            logits = self._model(**cache.inputs(self._tokens)).logits
            path, bonus, count = greedy_accept(logits, cache.tokens, cache.encoding)
            cache.commit_tensors(path)
        return logits, path, bonus, count
