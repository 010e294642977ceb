"""One recurrence between a TreeCache's markers and nothing else: the smallest graph that the passes work on.

B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treewy_inductor import ops, records
from treewy_inductor.backend import treewy
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.tree import DraftTree

Rule = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MarkedRule:
    """Inputs of a rule of transformers' signature, and the buffers of a cache; random, from seed 0.

    Attributes:
        vector_decay: a decay for each key channel.
        keys_dtype: of the cache's buffer of keys, that of the inputs by default.
    """

    trees: tuple[DraftTree, ...]
    heads: tuple[int, int] = (2, 4)
    dims: tuple[int, int] = (8, 12)
    dtype: torch.dtype = torch.float32
    vector_decay: bool = False
    keys_dtype: torch.dtype | None = None

    @property
    def operands(self) -> dict[str, Tensor]:
        """``q, k [B,N,HK,K]``, ``v [B,N,HV,V]``, ``g`` and ``beta [B,N,HV]``, ``state [B,HV,K,V]``."""
        B, N, (HK, HV), (K, V) = len(self.trees), max(map(len, self.trees)), self.heads, self.dims
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        decays = (B, N, HV, K) if self.vector_decay else (B, N, HV)
        return {
            "q": normal(B, N, HK, K).to(self.dtype),
            "k": normal(B, N, HK, K).to(self.dtype),
            "v": normal(B, N, HV, V).to(self.dtype),
            "g": -torch.rand(decays, generator=generator),
            "beta": torch.rand((B, N, HV), generator=generator).to(self.dtype),
            "state": normal(B, HV, K, V),
        }

    @property
    def buffers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pseudo-values, keys, path decays and key scales of a cache."""
        x = self.operands
        keys = torch.zeros_like(x["k"], dtype=self.keys_dtype or self.dtype)
        return torch.zeros(x["v"].shape), keys, torch.zeros(x["g"].shape), torch.zeros(x["k"].shape[:3])

    def function(self, rule: Rule, **kwargs: Any) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
        """Return a function of tensors that runs ``rule`` between markers, and those tensors."""

        def marked(q, k, v, g, beta, state, ancestors, order, internal, height, *buffers):  # type: ignore[no-untyped-def]
            start = ops.state_in(state, ancestors, order, internal, height, 0, 0)
            output, end = rule(q, k, v, g=g, beta=beta, initial_state=start, output_final_state=True, **kwargs)
            return output, *ops.state_out(end, *buffers, 0, 0)

        tree = TreeEncoding.of(*self.trees)
        encoding = (tree.ancestors, tree.order, tree.internal, tree.height)
        return marked, (*self.operands.values(), *encoding, *self.buffers)

    def compiled(self, rule: Rule, options: dict[str, Any] | None = None, **kwargs: Any) -> tuple[Any, list[records.Record]]:
        """Compile and run; return the outputs and what was proven. The rewritten graph runs op by op."""
        function, args = self.function(rule, **kwargs)
        torch._dynamo.reset()
        with torch.no_grad(), records.collect() as found:
            step = torch.compile(
                function, backend=treewy, fullgraph=True, dynamic=False, options={"treewy.codegen": False} | (options or {})
            )
            return step(*args), found
