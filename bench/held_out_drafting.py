"""Held-out prompts, and what every step of a greedy generation from them accepted: by its tree, and by the chain inside it.

The chain inside a tree is that of first children, which is what the same drafter proposes with widths of one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import treewy_inductor as treewy
from treewy_inductor.drafting import Draft, DraftRequest
from treewy_inductor.models.mtp_drafter import MtpDrafter
from treewy_inductor.tree import DraftTree

WIDTHS = ((1, 1, 1), (2, 2, 2), (3, 3, 3))
LENGTHS = (16, 32, 48, 64, 80)


def held_out_prompts(tokens: np.ndarray, count: int, seed: int = 0) -> list[list[int]]:
    """Return ``count`` pieces of the held-out ``tokens [T]``, of the lengths in ``LENGTHS`` by turns."""
    chance = random.Random(seed)
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(count)]
    starts = [chance.randrange(len(tokens) - length) for length in lengths]
    return [tokens[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]


@dataclass
class Drafting:
    """What greedy generation with one shape of tree did.

    Args:
        texts: new tokens of each prompt.
        by_tree: per prompt and step, how many tokens the step gave: the accepted drafts and one more.
        by_chain: per prompt and step, how many it would have given with the chain inside its tree alone.
    """

    texts: list[list[int]]
    by_tree: list[list[int]]
    by_chain: list[list[int]]
    seconds: float

    @property
    def accept_length(self) -> float:
        return sum(map(sum, self.by_tree)) / sum(map(len, self.by_tree))

    @property
    def chain_inside(self) -> float:
        return sum(map(sum, self.by_chain)) / sum(map(len, self.by_chain))

    @property
    def steps_below_the_chain(self) -> int:
        pairs = zip(self.by_tree, self.by_chain, strict=True)
        return sum(tree < chain for trees, chains in pairs for tree, chain in zip(trees, chains, strict=True))


class _Recorded:
    """The drafter of a model's prediction layer, keeping every tree with the length of the text that it continues."""

    wants_hidden_states = True

    def __init__(self, model: Any) -> None:
        self.drafter = MtpDrafter.of(model)
        self.trees: dict[int, list[tuple[int, DraftTree]]] = {}

    def begin(self, batch_size: int) -> None:
        self.drafter.begin(batch_size)

    def draft(self, request: DraftRequest) -> list[Draft]:
        drafts = self.drafter.draft(request)
        for row, tokens, draft in zip(request.rows, request.tokens, drafts, strict=True):
            self.trees.setdefault(row, []).append((len(tokens), draft.tree))
        return drafts


def draft_greedily(model: Any, prompts: list[list[int]], widths: tuple[int, ...], new_tokens: int, batch: int) -> Drafting:
    """Generate greedily from all prompts, ``batch`` rows at a time."""
    texts, by_tree, by_chain, started = [], [], [], time.perf_counter()
    for first in range(0, len(prompts), batch):
        rows, drafter = prompts[first : first + batch], _Recorded(model)
        out = treewy.generate(
            model,
            rows,
            max_new_tokens=new_tokens,
            do_sample=False,
            drafter=drafter,
            draft_tree_widths=widths,
            compile_options={"options": {"treewy.codegen": False}},
        )
        longest = max(map(len, rows))
        for row, prompt in enumerate(rows):
            new = until_end(out[row, longest:].tolist(), model.generation_config.eos_token_id)
            texts.append(new)
            places, trees = zip(*drafter.trees[row], strict=True)
            ends = [*places[1:], len(prompt) + len(new)]
            by_tree.append([end - place for place, end in zip(places, ends, strict=True)])
            by_chain.append([_given_by_chain(tree, [*prompt, *new][place:]) for place, tree in zip(places, trees, strict=True)])
    return Drafting(texts, by_tree, by_chain, time.perf_counter() - started)


def until_end(tokens: list[int], end: int) -> list[int]:
    """Return the tokens up to the first end token, that one included."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def _given_by_chain(tree: DraftTree, follows: Sequence[int]) -> int:
    """Return how many of the tokens that follow the root's come in one step: those on the chain and the one after them."""
    assert tree.tokens is not None
    node, given = 0, 0
    for token in follows:
        given += 1
        children = tree.children(node)
        if not children or tree.tokens[children[0]] != token:
            break
        node = children[0]
    return given
