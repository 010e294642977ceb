"""What the model tests share: a tiny model compiled for one size of tree, verifying beside a plain copy of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.path_oracle import path_logits, path_to, relative_error
from tests.tiny_models import VOCABULARY
from treewy_inductor import TreeCache
from treewy_inductor.backend import treewy

LENGTHS = (12, 5, 31)
# Four layers in float32 against the same layers over paths: rounding alone is 2e-6 at weights of 0.05.
TOLERANCE = 1e-5


class VerifiedModel:
    """A model compiled with the passes and without code generation, and the tokens that each row has committed."""

    def __init__(self, model: PreTrainedModel, nodes: int, **cache_options: Any) -> None:
        self.model, self.nodes, self.compiled = model, nodes, 0

        def counting(*args: Any, **options: Any) -> Callable[..., Any]:
            self.compiled += 1
            return treewy(*args, **options)

        self.step = torch.compile(model, backend=counting, fullgraph=True, dynamic=False, options={"treewy.codegen": False})
        self.cache_options = cache_options
        self.start()

    def start(self) -> None:
        """Begin with a new cache and new prompts."""
        self.cache = TreeCache(self.model.config, len(LENGTHS), 160, self.nodes, dtype=self.model.dtype, **self.cache_options)
        self.tokens = [torch.randint(0, VOCABULARY, (length,)) for length in LENGTHS]
        for row, tokens in enumerate(self.tokens):
            self.cache.prefill(self.model, tokens[None], rows=[row])

    @torch.no_grad()
    def verify(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits ``[B, N, vocabulary]`` of one tree a row."""
        self.cache.set_tree(parents)
        return self.step(**self.cache.inputs(tokens)).logits.clone()

    def errors(self, found: Tensor, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return the relative error of every node that is not inert, against its path run alone."""
        expected = torch.stack(
            [
                path_logits(self.model, self.tokens[row], tokens[row, : parents.shape[1]], parents[row])
                for row in range(len(self.tokens))
            ]
        )
        return relative_error(found[:, : parents.shape[1]], expected)[parents != -2]

    def commit(self, parents: Tensor, tokens: Tensor, last: list[int | None]) -> Tensor:
        """Commit each row's path to node ``last[row]``, None for none; return the path ``[B, N]``."""
        path = torch.full((len(last), self.nodes), -1, dtype=torch.int32)
        for row, node in enumerate(last):
            if node is not None:
                nodes = path_to(parents[row].tolist(), node)
                path[row, : len(nodes)] = torch.tensor(nodes)
                self.tokens[row] = torch.cat([self.tokens[row], tokens[row, nodes]])
        self.cache.commit(path)
        return path

    def assert_rows_equal_recomputing(self) -> None:
        """Compare every committed tensor with a new cache into which each row's tokens were put by plain forwards."""
        fresh = TreeCache(self.model.config, len(LENGTHS), 160, self.nodes, dtype=self.model.dtype)
        for row, tokens in enumerate(self.tokens):
            fresh.prefill(self.model, tokens[None], rows=[row])
        self.cache.states.settle()
        assert torch.equal(self.cache.lengths, fresh.lengths)
        for row, tokens in enumerate(self.tokens):
            for name in ("state", "history", "keys", "values"):
                found, expected = (getattr(cache, name)[:, row].double() for cache in (self.cache, fresh))
                if name in ("keys", "values"):
                    found, expected = found[:, :, : len(tokens)], expected[:, :, : len(tokens)]
                error = float((found - expected).norm() / expected.norm()) if expected.numel() else 0.0
                assert error < TOLERANCE, f"{name} of row {row} is off by {error}"
