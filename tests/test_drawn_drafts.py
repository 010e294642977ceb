"""Texts that the shipped model samples with drafts drawn from its prediction layer have the distribution it has alone."""

from __future__ import annotations

import torch
from torch import Tensor

import treewy_inductor as treewy
from bench.lossless import chi_square_p
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.models.mtp_drafter import MtpDrafter
from treewy_inductor.models.small_model import load_small_model

MODEL, TOKENIZER = load_small_model()
PROMPT = [TOKENIZER.eos_token_id, *TOKENIZER("for name in", add_special_tokens=False)["input_ids"]]
TOP, LENGTH, ROWS, BATCHES = 4, 3, 250, 2


@torch.no_grad()
def texts_of_the_model(temperature: float) -> tuple[list[list[int]], Tensor]:
    """Return every text of LENGTH tokens after the prompt, each among the TOP best, and its probability, by plain forwards."""
    texts, probabilities = [[]], torch.ones(1, dtype=torch.float64)
    for _ in range(LENGTH):
        logits = MODEL(torch.tensor([PROMPT + text for text in texts]), use_cache=False).logits[:, -1].double()
        best = logits.topk(TOP)
        after = (best.values / temperature).softmax(-1)
        texts = [[*text, token] for text, row in zip(texts, best.indices.tolist(), strict=True) for token in row]
        probabilities = (probabilities[:, None] * after).flatten()
    return texts, probabilities


def test_sampled_texts_have_the_models_own_distribution() -> None:
    statistics, found = GenerationStatistics(), []
    for batch in range(BATCHES):
        out = treewy.generate(
            MODEL, [PROMPT] * ROWS, max_new_tokens=LENGTH, do_sample=True, temperature=1.5, top_k=TOP, top_p=1.0,
            eos_token_id=None, pad_token_id=0, seed=10_000 + batch * ROWS, drafter=MtpDrafter.of(MODEL, sample=True),
            draft_tree_widths=(2, 2), statistics=statistics, compile_options={"options": {"treewy.codegen": False}},
        )  # fmt: skip
        found += out[:, len(PROMPT) :].tolist()
    texts, probabilities = texts_of_the_model(1.5)
    place = {tuple(text): i for i, text in enumerate(texts)}
    observed = torch.bincount(torch.tensor([place[tuple(text)] for text in found]), minlength=len(texts)).double()
    assert 0.001 < chi_square_p(observed, probabilities * len(found)) < 0.999
    # Drafts were both accepted and rejected, so both branches of the rule took part.
    depth, offered = statistics.accepted_by_depth, statistics.steps
    assert 0.2 * offered < depth[0] < 0.95 * offered
    # So many texts tell the distribution from that of a neighbouring temperature.
    assert chi_square_p(observed, texts_of_the_model(1.0)[1] * len(found)) < 1e-4
