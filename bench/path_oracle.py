"""What a draft tree's logits must be: the plain model, each root-to-node path run as an ordinary sequence.

No cache, no mask and nothing of this project takes part: prompt and path go through the unmodified model in one forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the root down to ``node``."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@torch.no_grad()
def path_logits(model: PreTrainedModel, committed: Tensor, tokens: Tensor, parents: Sequence[int] | Tensor) -> Tensor:
    """Return the logits ``[N, vocabulary]`` of every node; zeros at an inert node.

    Args:
        model: plain and eager.
        committed: ``[n]`` int64, the tokens before the root.
        tokens: ``[N]`` int64, the nodes' own.
        parents: of the nodes; -1 at a root, -2 at an inert node.
    """
    return path_logits_of_trees(model, committed, tokens[None], [parents])[0]


@torch.no_grad()
def path_logits_of_trees(
    model: PreTrainedModel, committed: Tensor, tokens: Tensor, trees: Sequence[Sequence[int] | Tensor]
) -> Tensor:
    """Return :func:`path_logits` of several trees after the same tokens, ``[trees, N, vocabulary]``.

    Paths of equal length go through the model as one batch of sequences.
    """
    by_length: defaultdict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    for i, tree in enumerate(trees):
        parents = tree.tolist() if isinstance(tree, Tensor) else list(tree)
        inner = set(parents)
        for leaf, parent in enumerate(parents):
            if parent != -2 and leaf not in inner:
                path = path_to(parents, leaf)
                by_length[len(path)].append((i, path))
    vocabulary = model.config.get_text_config().vocab_size
    logits = torch.zeros(*tokens.shape, vocabulary, dtype=model.dtype, device=tokens.device)
    for length, paths in by_length.items():
        sequences = torch.stack([torch.cat([committed, tokens[i, path]]) for i, path in paths])
        found = model(input_ids=sequences, use_cache=False).logits[:, -length:]
        for (i, path), values in zip(paths, found, strict=True):
            logits[i, path] = values
    return logits


def relative_error(found: Tensor, expected: Tensor) -> Tensor:
    """Return ``|found - expected| / |expected|`` over the last dimension, in float64."""
    found, expected = found.double(), expected.double()
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)
