"""Each kind of logits processor: greedy text and scores are those of the model's own generate, and a seed's text is one text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import treewy_inductor as treewy
from tests.tiny_models import tiny_model

FAST = {"options": {"treewy.codegen": False}}
MODEL = tiny_model()
MODEL.generation_config.pad_token_id = 0
PROMPTS = torch.tensor([[0, 0, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 9]])
MASK = (PROMPTS != 0).long()
FIRST = MODEL.generate(PROMPTS[:1], attention_mask=MASK[:1], max_new_tokens=8, do_sample=False)[0, 6:].tolist()

PROCESSORS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"encoder_repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 2},
    {"min_new_tokens": 6, "eos_token_id": FIRST[2]},
    {"min_length": 11, "eos_token_id": [FIRST[2], FIRST[4]]},
    {"bad_words_ids": [[FIRST[1]], [FIRST[2], FIRST[3]]]},
    {"sequence_bias": {(FIRST[1],): -5.0, (4, 5): 3.0}},
    {"suppress_tokens": [FIRST[0], FIRST[3]]},
    {"begin_suppress_tokens": [FIRST[0]]},
    {"forced_bos_token_id": 5},
    {"forced_eos_token_id": 7},
    {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": FIRST[6]},
    {"remove_invalid_values": True},
    {"renormalize_logits": True},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "min_new_tokens": 4, "eos_token_id": [FIRST[1], FIRST[2]]},
]
WARPERS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.5},
    {"min_p": 0.2},
    {"typical_p": 0.5},
    {"epsilon_cutoff": 0.01},
    {"eta_cutoff": 0.01},
    {"top_h": 0.4},
    {"repetition_penalty": 1.5},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "renormalize_logits": True},
]


def near_copy() -> Any:
    """Return a model whose drafts are often right and sometimes wrong."""
    draft = copy.deepcopy(MODEL)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return draft


DRAFT = near_copy()


@pytest.mark.parametrize("options", PROCESSORS, ids=lambda options: "-".join(options))
def test_greedy_text_and_scores_of_a_padded_batch_are_the_models_own(options: dict[str, Any]) -> None:
    arguments = {
        "attention_mask": MASK, "max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True,
        "output_scores": True, "output_logits": True, **options,
    }  # fmt: skip
    theirs = MODEL.generate(PROMPTS, **arguments)
    ours = MODEL.generate(
        PROMPTS, custom_generate=treewy.generate, drafter=DRAFT, draft_tree_widths=(2, 2), compile_options=FAST, **arguments
    )
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert len(ours.scores) == len(theirs.scores)
    ends = options.get("eos_token_id", [])
    for row, text in enumerate(theirs.sequences[:, 6:].tolist()):
        # What transformers computes for a row that has ended is of its padding.
        last = next((i for i, token in enumerate(text) if token in (ends if isinstance(ends, list) else [ends])), len(text) - 1)
        for name in ("scores", "logits"):
            pairs = zip(ours[name][: last + 1], theirs[name][: last + 1], strict=True)
            for own, other in pairs:
                torch.testing.assert_close(own[row], other[row], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", WARPERS, ids=lambda options: "-".join(options))
def test_a_seeds_text_is_one_text(options: dict[str, Any]) -> None:
    # Older versions penalise padding as if it were text: there a row's own text depends on how far it is padded.
    prompts = (
        [[5, 6, 7, 8], [1, 2, 3, 4], [9, 3, 2, 5]] if "repetition_penalty" in options else [[5, 6, 7, 8], [1, 2, 3, 4, 5], [9]]
    )

    def sampled(rows: list[int], **more: Any) -> list[int]:
        """Return the new tokens of row 2, sampled among ``rows``."""
        own = {"do_sample": True, "top_k": 0, "max_new_tokens": 8, "compile_options": FAST, "drafter": DRAFT, **options}
        given = [prompts[row] for row in rows]
        out = treewy.generate(MODEL, given, seed=[11 + row for row in rows], **(own | more))
        return out[rows.index(2), max(map(len, given)) :].tolist()

    def drafts_the_best(tokens: list[int]) -> treewy.DraftTree:
        with torch.no_grad():
            best = MODEL(torch.tensor([tokens])).logits[0, -1].topk(3).indices.tolist()
        return treewy.DraftTree.from_paths(tokens[-1], [[token] for token in best])

    # Drawn drafts: whatever the batch. Determined ones: whatever the tree too.
    assert sampled([2], draft_tree_widths=(2, 2)) == sampled([0, 1, 2], draft_tree_widths=(2, 2))
    without = sampled([2], draft_tree_widths=(3,), drafter="prompt_lookup")
    for more in ({"draft_node_budget": 6, "drafter": DRAFT}, {"draft_tree_widths": (3,), "drafter": drafts_the_best}):
        assert sampled([1, 2], **more) == without
