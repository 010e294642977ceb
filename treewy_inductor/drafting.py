"""What a drafter is given and what it returns.

A drafter is any callable ``tokens -> DraftTree``, called for one row at a time, or an object with a method
``draft(request)`` that answers for all running rows at once. It never has to be right, nor to sample: whatever tree it
returns, the text is the target model's; a better tree only makes it come in fewer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from treewy_inductor.tree import DraftTree

# How far a sum of probabilities in bfloat16 may be from 1.
_ROUNDING = 1e-2


@dataclass(frozen=True)
class Draft:
    """A draft tree with the distributions its tokens were drawn from.

    Args:
        tree: with tokens; node 0 is the root and holds the row's last token.
        probabilities: ``[nodes, vocab]`` float. Row t is the distribution from which the children of node t were drawn
            one after the other, in node order, without replacement. None: the tokens were not drawn but determined.
    """

    tree: DraftTree
    probabilities: Tensor | None = None


class DraftSampling(Protocol):
    """How the target samples, for drafters that draw their tokens."""

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return ``[R, vocab]`` float64 probabilities of ``logits`` ``[R, vocab]`` after the target's warpers."""

    def uniforms(self, entries: Sequence[int], draws: Sequence[int]) -> Tensor:
        """Return ``[R]`` float64 in [0, 1), the row's own numbers: ``draws[r]`` names a draw within the tree of entry
        ``entries[r]``, from 0 to 2 ** 24, and is used once a step."""


@dataclass(frozen=True)
class DraftRequest:
    """One step's request, with one entry per row that still runs.

    Args:
        rows: batch rows; a row keeps its number for the whole generation.
        tokens: all tokens of each row without padding. The last one is the root: chosen, but not in the model's state yet.
        room: how many tokens each row may still get; nodes deeper than that are never used.
        max_nodes: the most nodes a tree may have, its root included.
        widths: children per node and level, or None where a node budget was given.
        node_budget: nodes, the root included, to be spent where the drafter's probabilities are highest.
        hidden_states: only for drafters with ``wants_hidden_states``. Per row ``[new, hidden]``, what the language model head
            reads for the tokens that entered the model's state since the row's last request: seen in total they belong to
            ``tokens[held:-1]``.
        held: how many tokens of each row a given cache held before the generation; None if there was none.
        sampling: None under greedy decoding.
        vocab_size: of the target; drafts are below it.
    """

    rows: list[int]
    tokens: list[list[int]]
    room: list[int]
    max_nodes: int
    widths: tuple[int, ...] | None = None
    node_budget: int | None = None
    hidden_states: list[Tensor] | None = None
    held: list[int] | None = None
    sampling: DraftSampling | None = None
    vocab_size: int | None = None


class Drafter(Protocol):
    """A drafter that answers for all rows at once.

    It may have an attribute ``wants_hidden_states`` and a method ``begin(batch_size)``, called before the first request of
    every generation; and a :class:`CapturedDrafting`.
    """

    def draft(self, request: DraftRequest) -> Sequence[DraftTree | Draft]:
        """Return one tree per entry of the request."""


class CapturedDrafting(Protocol):
    """Drafting on the device with fixed shapes, so that one CUDA graph holds it together with the verification.

    A drafter offers it with a method ``captured(rows, places, widths) -> CapturedDrafting`` and an attribute ``capture_key``
    that tells whether an earlier one can be used again; ``places`` are the most tokens of a row, drafts included.

    Args:
        parents: ``[M]`` int32 on the device, the shape of every tree.
    """

    parents: Tensor

    def begin(self, request: DraftRequest) -> None:
        """Read the prompts, eagerly, before the first step of a generation."""

    def draft(self, roots: Tensor, lengths: Tensor) -> Tensor:
        """Return the trees' tokens ``[B, M]`` below ``roots`` ``[B]``, each behind ``lengths`` ``[B]`` committed tokens."""

    def take(self, hidden: Tensor, path: Tensor, emitted: Tensor, kept: Tensor, lengths: Tensor) -> None:
        """Read what a step accepted.

        Args:
            hidden: ``[B, N, D]`` of the nodes; path: ``[B, N]`` int32; emitted: ``[B, ...]`` int64, the token after each node
                of the path; kept: ``[B]`` int64, how many of them hold; lengths: ``[B]`` int64, after the commit.
        """


class RowByRow:
    """A callable ``tokens -> DraftTree`` as a drafter."""

    def __init__(self, function: Callable[[list[int]], DraftTree | Draft]) -> None:
        self.function = function

    def draft(self, request: DraftRequest) -> list[DraftTree | Draft]:
        return [self.function(list(tokens)) for tokens in request.tokens]


def as_drafter(drafter: Any) -> Drafter:
    """Return ``drafter`` itself if it has ``draft``, or a drafter that calls it row by row."""
    if hasattr(drafter, "draft"):
        return drafter
    if callable(drafter):
        return RowByRow(drafter)
    raise ValueError(
        f"drafter is a {type(drafter).__name__}: pass a callable from tokens to DraftTree, or an object with draft(request)"
    )


def checked_drafts(drafter: Drafter, request: DraftRequest, vocab_size: int) -> list[Draft]:
    """Return the drafter's trees for ``request``, all of them fit to be verified.

    Raises:
        ValueError: not one tree per row; a tree without tokens, with another root than the row's last token, with more than
            ``request.max_nodes`` nodes, or with a token outside the vocabulary; drawn siblings that hold the same token;
            probabilities that are no distributions, or that do not give a drawn token any.
    """
    answered = drafter.draft(request)
    name = type(drafter.function if isinstance(drafter, RowByRow) else drafter).__name__
    if not isinstance(answered, Iterable):
        raise ValueError(f"drafter {name} returned a {type(answered).__name__}: return a list with one tree a row")
    answers = list(answered)
    if len(answers) != len(request.rows):
        raise ValueError(f"drafter {name} returned {len(answers)} trees for {len(request.rows)} rows: return one a row")
    drafts = [answer if isinstance(answer, Draft) else Draft(answer) for answer in answers]
    for row, tokens, draft in zip(request.rows, request.tokens, drafts, strict=True):
        tree = draft.tree
        if not isinstance(tree, DraftTree) or tree.tokens is None:
            raise ValueError(f"drafter {name} returned no tokens for row {row}: return a DraftTree with tokens")
        if len(tree) > request.max_nodes:
            raise ValueError(
                f"drafter {name} returned {len(tree)} nodes for row {row}, but the cache verifies at most "
                f"{request.max_nodes}: draft fewer, or give a cache with more max_nodes"
            )
        for t, token in enumerate(tree.tokens):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"drafter {name} put token {token} at node {t} of row {row}, outside the vocabulary of {vocab_size}: "
                    "draft with the target model's tokenizer"
                )
        if tree.tokens[0] != tokens[-1]:
            raise ValueError(
                f"drafter {name} put token {tree.tokens[0]} at the root of row {row}, whose last token is {tokens[-1]}: "
                "node 0 is the token accepted last"
            )
        if draft.probabilities is not None:
            _check_drawn(name, row, tree, tree.tokens, draft.probabilities, vocab_size)
    return drafts


def _check_drawn(name: str, row: int, tree: DraftTree, tokens: list[int], probabilities: Tensor, vocab_size: int) -> None:
    if not isinstance(probabilities, Tensor) or not probabilities.is_floating_point():
        found = probabilities.dtype if isinstance(probabilities, Tensor) else f"a {type(probabilities).__name__}"
        raise ValueError(f"drafter {name} returned probabilities of row {row} as {found}: return a tensor of floats")
    if tuple(probabilities.shape) != (len(tree), vocab_size):
        raise ValueError(
            f"drafter {name} returned probabilities {list(probabilities.shape)} for row {row}, expected "
            f"{[len(tree), vocab_size]}: one distribution a node"
        )
    if len(set(zip(tree.parents, tokens, strict=True))) != len(tree):
        raise ValueError(f"drafter {name} drew one token twice under one node of row {row}: draw siblings without replacement")
    children = [t for t, parent in enumerate(tree.parents) if parent >= 0]
    if not children:
        return
    above = [tree.parents[t] for t in children]
    rows = probabilities[above]
    drawn = rows[range(len(children)), [tokens[t] for t in children]].double()
    # One reading of the device for the whole tree.
    told = torch.stack([rows.amin(1).double(), rows.sum(1, dtype=torch.float64), drawn], 1).tolist()
    for child, node, (least, total, own) in zip(children, above, told, strict=True):
        if not (least >= 0 and abs(total - 1) <= _ROUNDING):
            raise ValueError(
                f"drafter {name} gave node {node} of row {row} probabilities from {least:g} on that sum to {total:g}: they "
                "must be at least 0 and sum to 1"
            )
        if not own > 0:
            raise ValueError(
                f"drafter {name} drew token {tokens[child]} under node {node} of row {row}, to which it gave probability 0: "
                "return the distribution that the children were drawn from"
            )
