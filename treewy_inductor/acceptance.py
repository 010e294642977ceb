"""Which nodes of a verified draft tree are accepted when every token is the model's most likely one.

A node is accepted if its token is what the model predicts after its parent and the parent is accepted; the root always is.
Siblings hold different tokens in a sensible tree; if two hold the same, the one of the lower index stands for both. So at
most one child of a node is accepted, and the accepted nodes are one path from the root down.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor import ops_combined
from treewy_inductor.compile_per_shape import compile_per_shape
from treewy_inductor.encoding import TreeEncoding


def accept_matching(
    predicted: Tensor, tokens: Tensor, parents: Tensor, ancestors: Tensor, depth: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``path, bonus, count`` for the token ``predicted`` after each node; see :func:`greedy_accept`.

    Nothing here depends on what a rejected or inert node holds or predicts.

    Args:
        predicted: ``[B, N]`` int64, the token the model puts after node t.
        tokens: ``[B, N]`` int64, the token that node t holds.
        parents, depth: ``[B, N]`` int32; ancestors: ``[B, N, W]`` int64, of a :class:`TreeEncoding`.
    """
    nodes = parents.shape[1]
    node = torch.arange(nodes, device=parents.device)
    expected = predicted.gather(1, parents.clamp(min=0).long())
    matches = (parents >= 0) & (tokens == expected)
    twin = (parents[:, :, None] == parents[:, None, :]) & matches[:, None, :] & (node < node[:, None])
    # Only the first root is the token accepted last: nothing predicts another root of a forest.
    first_root = (parents == -1) & ((parents == -1).cumsum(1) == 1)
    matches = (matches & ~twin.any(-1)) | first_root

    word = torch.arange(ancestors.shape[2], device=parents.device)
    bit = torch.where(node[:, None] // 64 == word, 1 << (node[:, None] % 64), 0)  # [N, W]
    mismatches = torch.where(matches[..., None], 0, bit).sum(1)  # [B, W]
    accepted = ((ancestors & mismatches[:, None]) == 0).all(-1) & (depth >= 0)

    count = accepted.sum(1)
    slot = torch.where(accepted, depth, nodes)
    path = torch.where(slot[:, None, :] == node[:, None], node + 1, 0).sum(-1).int() - 1  # [B, N]
    last = path.gather(1, (count - 1).clamp(min=0)[:, None]).clamp(min=0).long()
    bonus = torch.where(count > 0, predicted.gather(1, last)[:, 0], -1)
    return path, bonus, count


def _accept_greedily(
    logits: Tensor, tokens: Tensor, parents: Tensor, ancestors: Tensor, depth: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return accept_matching(ops_combined.best_token(logits), tokens, parents, ancestors, depth)


_accept_greedily_compiled = compile_per_shape(_accept_greedily)


def greedy_accept(logits: Tensor, tokens: Tensor, encoding: TreeEncoding) -> tuple[Tensor, Tensor, Tensor]:
    """Accept the longest path on which each token is the model's most likely one; nothing waits for the device.

    Args:
        logits: ``[B, N, vocab]`` float, of each node's next token.
        tokens: ``[B, N]`` int64, the tokens of the nodes; at an inert node anything.
        encoding: of the trees that were verified. It also decides whether this runs as compiled code.

    Returns:
        path: ``[B, N]`` int32, accepted nodes from the root down, then -1; the root of a real row is always there.
        bonus: ``[B]`` int64, the token after the last accepted node: the next tree's root. -1 in a row without nodes.
        count: ``[B]`` int64, accepted nodes, which is also how many tokens the row commits; 0 in a row without nodes.

    The new tokens of a step are ``tokens[path[1:]]`` and then the bonus: the root was counted in the step before.
    """
    if logits.shape[:2] != encoding.parents.shape or tokens.shape != encoding.parents.shape:
        raise ValueError(
            f"logits {list(logits.shape)} and tokens {list(tokens.shape)} for trees of {list(encoding.parents.shape)}: "
            "give every node's, inert nodes included"
        )
    accept = _accept_greedily_compiled if encoding.compiled else _accept_greedily
    return accept(logits, tokens, encoding.parents, encoding.ancestors, encoding.depth)
