"""Draft trees with a smaller model of the same vocabulary.

Each row has an ordinary cache that holds the tokens up to the root. Below the root the tree grows level by level: the cache is
copied once per node of the level (``reorder_cache``, as beam search does), so recurrent layers branch as well as softmax ones.
"""

from __future__ import annotations

import copy
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from treewy_inductor.drafting import Draft, DraftRequest
from treewy_inductor.grow_tree import FrontierNode, grow_trees
from treewy_inductor.models.transformers_api import cache_keyword, last_logits_only, uncompiled


class AssistantDrafter:
    """See the module.

    Args:
        model: a causal language model of transformers with the target's tokens; if it has room for more or fewer, as padded
            vocabularies differ, drafts are taken from those that both have.
        max_depth: of a tree under a node budget; widths bring their own depth.
        sample: whether to draw tokens when the target samples. If False the most probable are taken, which is as lossless.
    """

    def __init__(self, model: torch.nn.Module, max_depth: int = 8, sample: bool = True) -> None:
        self.model: PreTrainedModel = uncompiled(model)
        self.max_depth, self.sample = max_depth, sample
        self._held: dict[int, tuple[DynamicCache, int]] = {}

    def begin(self, batch_size: int) -> None:
        self._held = {}

    def draft(self, request: DraftRequest) -> list[Draft]:
        self._refuse_foreign(request)
        branches: dict[int, DynamicCache] = {}
        place_of: dict[tuple[int, int], int] = {}

        def extend(frontier: list[FrontierNode]) -> Tensor:
            logits = []
            for entry, group in groupby(frontier, key=lambda node: node.entry):
                nodes = list(group)
                if nodes[0].depth == 0:
                    cache, last = self._caught_up(request.rows[entry], request.tokens[entry])
                    branches[entry] = copy.deepcopy(cache)
                else:
                    above = torch.tensor([place_of[entry, node.parent] for node in nodes], device=self.model.device)
                    branches[entry].reorder_cache(above)
                    position = len(request.tokens[entry]) - 1 + nodes[0].depth
                    last = self._run(branches[entry], [[node.token] for node in nodes], position)
                place_of.update({(entry, node.node): place for place, node in enumerate(nodes)})
                logits.append(last)
            return _of_width(torch.cat(logits), request.vocab_size)

        return grow_trees(request, extend, max_depth=self.max_depth, sample=None if self.sample else False)

    def _refuse_foreign(self, request: DraftRequest) -> None:
        known = self.model.get_input_embeddings().weight.shape[0]
        for row, tokens in zip(request.rows, request.tokens, strict=True):
            new = tokens[self._held[row][1] :] if row in self._held else tokens
            if max(new, default=0) >= known:
                raise ValueError(
                    f"row {row} holds token {max(new)}, and the drafting model {type(self.model).__name__} has a vocabulary of "
                    f"{known}: draft with a model of the target's tokenizer"
                )

    def _caught_up(self, row: int, tokens: list[int]) -> tuple[DynamicCache, Tensor]:
        """Return the row's cache with all of ``tokens`` in it, and the logits ``[1, vocab]`` after them."""
        cache, held = self._held.get(row, (None, 0))
        if cache is None:
            cache = DynamicCache(config=self.model.config)
        logits = self._run(cache, [tokens[held:]], held)
        self._held[row] = cache, len(tokens)
        return cache, logits

    @torch.no_grad()
    def _run(self, cache: DynamicCache, tokens: list[list[int]], position: int) -> Tensor:
        ids = torch.tensor(tokens, device=self.model.device)
        positions = torch.arange(position, position + ids.shape[1], device=ids.device).expand(len(ids), -1)
        arguments: dict[str, Any] = {cache_keyword(self.model): cache} | last_logits_only(self.model)
        return self.model(input_ids=ids, position_ids=positions, use_cache=True, **arguments).logits[:, -1]


def _of_width(logits: Tensor, width: int | None) -> Tensor:
    """Return ``logits`` ``[F, vocab]`` over the target's vocabulary, tokens that only the target has at minus infinity."""
    missing = 0 if width is None else width - logits.shape[1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
