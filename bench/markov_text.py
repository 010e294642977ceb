"""A target and a drafter whose distributions are known exactly, behind the interfaces of the real ones.

Texts are second-order Markov chains over a small vocabulary. :class:`MarkovVerifier` stands where a model and its TreeCache
stand in the decoding loop, so the loop, the drafters and the acceptance rules run unchanged, for many rows at once.

    B rows   N nodes   V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treewy_inductor.drafting import Draft, DraftRequest
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.grow_tree import FrontierNode, grow_trees
from treewy_inductor.tree import DraftTree


def random_chain(vocabulary: int, seed: int) -> Tensor:
    """Return ``[V, V, V]`` float64: the logits of the next token after each pair of tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocabulary, vocabulary, vocabulary, dtype=torch.float64, generator=generator)


class MarkovVerifier:
    """See :class:`treewy_inductor.decoding.Verifier`; each row's state is its last committed token."""

    def __init__(self, logits: Tensor, rows: int, max_nodes: int) -> None:
        self.logits, self.rows, self.max_nodes = logits, rows, max_nodes
        self.vocab_size = logits.shape[0]
        self.device = torch.device("cpu")
        self.encoding = TreeEncoding(rows, max_nodes)
        self.state = torch.zeros(rows, dtype=torch.int64)
        self.tokens = torch.zeros(rows, max_nodes, dtype=torch.int64)

    def prefill(self, prompts: dict[int, list[int]]) -> dict[int, Tensor]:
        self.state[list(prompts)] = torch.tensor([prompt[-1] for prompt in prompts.values()])
        return {}

    def verify(self, trees: Sequence[DraftTree | None], tokens: Tensor) -> tuple[Tensor, None]:
        parents = torch.full((self.rows, self.max_nodes), -2, dtype=torch.int32)
        for row, tree in enumerate(trees):
            if tree is not None:
                parents[row, : len(tree)] = torch.tensor(tree.parents, dtype=torch.int32)
        self.encoding.parents.copy_(parents)
        self.tokens = tokens
        before = torch.where(parents >= 0, tokens.gather(1, parents.clamp(min=0).long()), self.state[:, None])
        logits = self.logits[before, tokens]
        # What stands at an inert node must not matter.
        return torch.where((parents == -2)[..., None], torch.nan, logits), None

    def commit(self, path: Tensor) -> None:
        count = (path >= 0).sum(1)
        last = path.gather(1, (count - 1).clamp(min=0)[:, None]).clamp(min=0).long()
        self.state = torch.where(count > 0, self.tokens.gather(1, last)[:, 0], self.state)


class MarkovDrafter:
    """Drafts from another chain; ``sample=False`` takes its most probable tokens, True draws them."""

    def __init__(self, logits: Tensor, sample: bool | None = None) -> None:
        self.logits, self.sample = logits, sample

    def draft(self, request: DraftRequest) -> list[Draft]:
        token_of: dict[tuple[int, int], int] = {}

        def extend(frontier: list[FrontierNode]) -> Tensor:
            before = []
            for node in frontier:
                token_of[node.entry, node.node] = node.token
                text = request.tokens[node.entry]
                before.append(text[-2] if node.parent < 0 else token_of[node.entry, node.parent])
            return self.logits[torch.tensor(before), torch.tensor([node.token for node in frontier])]

        return grow_trees(request, extend, sample=self.sample)
