"""Generation behind a cache that holds a prefix: forked, gone back to, reordered, saved, in a conversation, with drafts throughout.

Every text is compared with the model's own from scratch, and most steps commit several tokens at once, so that what is reused
was itself left by speculation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import treewy_inductor as treewy
from tests.tiny_models import tiny_model
from treewy_inductor.drafting import DraftRequest
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.memory import POLICIES
from treewy_inductor.models.small_model import load_small_model
from treewy_inductor.tree import DraftTree

FAST = {"options": {"treewy.codegen": False}}
MODEL = tiny_model()
MODEL.generation_config.pad_token_id = 0
KNOWN: list[list[int]] = []
SMALL, TOKENIZER = load_small_model()


def plain(text: list[int], count: int, model: Any = MODEL) -> list[int]:
    ids = torch.tensor([text])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return out[0, len(text) :].tolist()


def next_tokens(tokens: list[int], count: int) -> list[int]:
    """Return the model's next tokens, from a text that is known already if one begins with ``tokens``."""
    known = (text for text in KNOWN if len(text) >= len(tokens) + count and text[: len(tokens)] == tokens)
    text = next(known, None)
    if text is None:
        text = [*tokens, *plain(tokens, 16)]
        KNOWN.append(text)
    return text[len(tokens) : len(tokens) + count]


class Knows:
    """Drafts what the model says next beside a wrong sibling, right for a depth that changes from step to step."""

    def __init__(self) -> None:
        self.step = 0

    def draft(self, request: DraftRequest) -> list[DraftTree]:
        self.step += 1
        trees = []
        for tokens in request.tokens:
            right = next_tokens(tokens, 1 + self.step % 3)
            wrong = [[*right[:depth], (token + 1) % 128] for depth, token in enumerate(right)]
            trees.append(DraftTree.from_paths(tokens[-1], [*wrong, right]))
        return trees


def generate(texts: list[list[int]], count: int, cache: Any, drafter: Any = None, **more: Any) -> list[list[int]]:
    own = {"do_sample": False, "drafter": drafter or Knows(), "draft_node_budget": 7, "compile_options": FAST}
    out = treewy.generate(MODEL, texts, max_new_tokens=count, cache=cache, **(own | more))
    return out[:, max(map(len, texts)) :].tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_conversation_in_which_every_turn_is_forked_gone_back_to_and_reordered(policy: str, tmp_path: Path) -> None:
    cache = treewy.TreeCache(MODEL.config, 2, 96, 7, mamba_state_commit=policy)
    texts = [[5, 6, 7, 8, 9, 5, 6, 7, 8], [11, 12, 13]]
    for turn in range(3):
        seen = GenerationStatistics()
        new = generate(texts, 5 + turn, cache, statistics=seen)
        assert new == [plain(text, 5 + turn) for text in texts]
        assert seen.tokens_per_step > 1.5
        texts = [[*text, *own, 17 + turn, 20 + row] for row, (text, own) in enumerate(zip(texts, new, strict=True))]

        other = [*texts[1][:-1], 33]
        expected = [plain(text, 5) for text in (texts[1], texts[0], other)]
        assert generate([texts[1], texts[0], other], 5, cache.fork([1, 0, 1])) == expected

        kept = cache.snapshot()
        assert generate(texts, 5, cache) == [expected[1], expected[0]]
        cache.restore(kept)
        cache.save(tmp_path / "kept.safetensors")
        larger = treewy.TreeCache(MODEL.config, 3, 128, 10, mamba_state_commit=policy)
        larger.load(tmp_path / "kept.safetensors", rows=[2, 0])
        again = generate([texts[1], [3], texts[0]], 5, larger, draft_node_budget=10)
        assert again == [expected[0], plain([3], 5), expected[1]]

        cache.reorder(torch.tensor([1, 0]))
        texts = texts[::-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_that_beams_share_and_part_equal_recomputing(policy: str) -> None:
    """As beam search does it: after each step all rows go on from the rows that a ranking names, some of them twice."""
    cache = treewy.TreeCache(MODEL.config, 3, 64, 7, mamba_state_commit=policy)
    texts = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    for step, parents in enumerate(([1, 1, 2], [2, 0, 0], [1, 2, 1], [0, 0, 0])):
        new = generate(texts, 2 + step % 2, cache)
        assert new == [plain(text, 2 + step % 2) for text in texts]
        texts = [text + own for text, own in zip(texts, new, strict=True)]
        cache.reorder_cache(torch.tensor(parents))
        # Beams that share a past part with their next token.
        texts = [[*texts[parent][:-1], 40 + beam] for beam, parent in enumerate(parents)]
    assert generate(texts, 4, cache) == [plain(text, 4) for text in texts]


@pytest.mark.parametrize("held", range(9))
def test_any_length_may_be_held(held: int) -> None:
    text = [5, 6, 7, 8, 9, 5, 6, 7, 8]
    cache = treewy.TreeCache(MODEL.config, 1, 64, 7)
    if held:
        cache.prefill(MODEL, torch.tensor([text[:held]]))
    assert generate([text], 6, cache) == [plain(text, 6)]


def test_a_seeds_text_does_not_depend_on_what_was_held() -> None:
    text, own = [5, 6, 7, 8, 9], {"do_sample": True, "top_k": 0, "temperature": 0.8, "drafter": "prompt_lookup"}
    cache = treewy.TreeCache(MODEL.config, 1, 64, 7)
    cache.prefill(MODEL, torch.tensor([text[:-1]]))
    forked = generate([text, text], 8, cache.fork([0, 0]), seed=[3, 4], **own)
    alone = [generate([text], 8, None, seed=[seed], **own)[0] for seed in (3, 4)]
    assert forked == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize("held", [0, 1, 20, -1])
def test_the_prediction_layer_drafts_behind_tokens_whose_states_it_never_saw(held: int) -> None:
    words = "import os\n\n\nclass Folder:\n    def __init__(self, path, mode=None):\n        self.path = path\n"
    text = [TOKENIZER.eos_token_id, *TOKENIZER(words, add_special_tokens=False)["input_ids"]]
    cache = treewy.TreeCache(SMALL.config, 2, 128, 7)
    # One row goes on from a prefix, the other one begins.
    if held:
        cache.prefill(SMALL, torch.tensor([text[:held]]), rows=[1])
    seen = GenerationStatistics()
    out = treewy.generate(
        SMALL, [text[:9], text], max_new_tokens=24, do_sample=False, eos_token_id=None, drafter="mtp",
        draft_tree_widths=(2, 2), cache=cache, compile_options=FAST, statistics=seen,
    )  # fmt: skip
    assert out[:, len(text) :].tolist() == [plain(text[:9], 24, SMALL), plain(text, 24, SMALL)]
    assert seen.tokens_per_step > 1.5
    # And once more, from what that left.
    longer: list[list[int]] = [[*row[-n:].tolist(), 5] for row, n in zip(out, (9 + 24, len(text) + 24), strict=True)]
    again: Tensor = treewy.generate(
        SMALL, longer, max_new_tokens=8, do_sample=False, eos_token_id=None, drafter="mtp", draft_tree_widths=(2, 2),
        cache=cache, compile_options=FAST,
    )  # fmt: skip
    assert again[:, -8:].tolist() == [plain(one, 8, SMALL) for one in longer]
