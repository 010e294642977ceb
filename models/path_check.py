"""How far a verified tree's logits are from the plain model's, each root-to-node path run as an ordinary sequence."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from transformers import PreTrainedModel

from treewy_inductor.models.model_verifier import ModelVerifier, borrowed_cache
from treewy_inductor.tree import DraftTree


@torch.no_grad()
def largest_path_error(
    model: PreTrainedModel,
    text: list[int],
    tree: DraftTree,
    options: dict[str, Any] | None = None,
    room: int = 0,
    with_hidden: bool = False,
) -> float:
    """Return the largest ``|tree - path| / |path|`` over the nodes' logits.

    Args:
        text: tokens before the root, at least one.
        tree: with tokens, the root's own among them.
        options: of ``torch.compile``.
        room, with_hidden: tokens that the cache shall have room for, and whether the step returns hidden states: those of a
            generation, to find its compiled step again.
    """
    assert tree.tokens is not None
    with borrowed_cache(model, 1, max(room, len(text)), max(2, len(tree))) as cache:
        verifier = ModelVerifier(model, cache, with_hidden, options)
        verifier.prefill({0: text})
        tokens = torch.zeros(1, cache.max_nodes, dtype=torch.int64)
        tokens[0, : len(tree)] = torch.tensor(tree.tokens)
        found = verifier.verify([tree], tokens.to(model.device))[0][0].double()
    by_length = defaultdict(list)
    for leaf in set(range(len(tree))) - set(tree.parents):
        path = tree.path_to(leaf)
        by_length[len(path)].append(path)
    worst = 0.0
    for length, paths in by_length.items():
        sequences = torch.tensor([text + [tree.tokens[t] for t in path] for path in paths], device=model.device)
        plain = model(input_ids=sequences, use_cache=False).logits[:, -length:].double()
        error = (found[torch.tensor(paths)] - plain).norm(dim=-1) / plain.norm(dim=-1)
        worst = max(worst, float(error.max()))
    return worst
