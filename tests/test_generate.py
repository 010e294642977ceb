"""treewy.generate against the model's own generate, on an unmodified model with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import treewy_inductor as treewy
from tests.tiny_models import VOCABULARY, tiny_model
from treewy_inductor.drafting import DraftRequest
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.models.model_verifier import compiled_steps
from treewy_inductor.tree import DraftTree

FAST = {"options": {"treewy.codegen": False}}
PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8], [3], [11, 12, 13, 14]]
MODEL = tiny_model()
MODEL.generation_config.pad_token_id = 0


def plain(prompt: list[int], count: int, **options: Any) -> list[int]:
    """Return the new tokens of the model's own generate."""
    ids = torch.tensor([prompt])
    return MODEL.generate(ids, max_new_tokens=count, do_sample=False, **options)[0, len(prompt) :].tolist()


class KnowsTheText:
    """Drafts the true continuation among wrong siblings; ``right_for`` levels of it, wrong ones below."""

    def __init__(self, texts: list[list[int]], right_for: Callable[[int], int] = lambda step: 99) -> None:
        self.texts, self.right_for, self.step = texts, right_for, 0

    def draft(self, request: DraftRequest) -> list[DraftTree]:
        self.step += 1
        trees = []
        assert request.widths is not None
        for tokens in request.tokens:
            text = next(text for text in self.texts if text[: len(tokens)] == tokens)
            shape = DraftTree.from_widths(request.widths)
            drafted = [tokens[-1]]
            for t in range(1, len(shape)):
                depth, parent = shape.depths[t], shape.parents[t]
                right = text[len(tokens) - 1 + depth] if len(tokens) - 1 + depth < len(text) else 0
                siblings = shape.children(parent)
                # The true token is the last of the siblings, so that a tree accepts more than its first chain.
                is_right = t == siblings[-1] and depth <= self.right_for(self.step)
                drafted.append(right if is_right else (right + 1 + siblings.index(t)) % VOCABULARY)
            trees.append(DraftTree(shape.parents, drafted))
        return trees


class Collects(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return [prompt + plain(prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2), (3, 2, 1)])
def test_greedy_text_of_a_ragged_batch_is_the_rows_own(texts: list[list[int]], widths: tuple[int, ...]) -> None:
    statistics = GenerationStatistics()
    out = treewy.generate(
        MODEL,
        PROMPTS,
        max_new_tokens=20,
        do_sample=False,
        drafter=KnowsTheText(texts, right_for=lambda step: step % 4),
        draft_tree_widths=widths,
        statistics=statistics,
        compile_options=FAST,
    )
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        assert out[row, 9:].tolist() == text[len(prompt) : len(prompt) + 20]
        assert out[row, 9 - len(prompt) : 9].tolist() == prompt
    assert statistics.tokens == 60
    assert statistics.accepted_by_depth[0] > 0
    assert statistics.tokens_per_step > 1.5


def test_custom_generate_returns_what_generate_returns(texts: list[list[int]]) -> None:
    ids = torch.tensor(PROMPTS[:1])
    statistics = GenerationStatistics()
    arguments = {
        "max_new_tokens": 12,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
    }
    ours = MODEL.generate(
        ids,
        custom_generate=treewy.generate,
        draft_tree_widths=(2, 2),
        drafter=KnowsTheText([[*PROMPTS[0], *plain(PROMPTS[0], 20, repetition_penalty=1.3, no_repeat_ngram_size=2)]]),
        statistics=statistics,
        compile_options=FAST,
        **arguments,
    )
    theirs = MODEL.generate(ids, **arguments)
    assert type(ours) is type(theirs)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert statistics.steps == 4
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(theirs[name]) == 12
        torch.testing.assert_close(torch.stack(ours[name]), torch.stack(theirs[name]), rtol=1e-4, atol=1e-4)


def test_left_padded_batch_equals_the_models_own() -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    ours = MODEL.generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False, custom_generate=treewy.generate,
        draft_tree_widths=(2, 2), compile_options=FAST,
    )  # fmt: skip
    assert ours[:, :5].tolist() == ids.tolist()
    assert ours[:, 5:].tolist() == [plain([5, 6, 7], 8), plain([1, 2, 3, 4, 5], 8)]


def test_a_penalty_counts_a_padded_batch_as_the_models_own_generate_does() -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
    arguments = {
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]), "max_new_tokens": 8, "do_sample": False,
        "repetition_penalty": 1.5,
    }  # fmt: skip
    ours = MODEL.generate(ids, custom_generate=treewy.generate, draft_tree_widths=(2, 2), compile_options=FAST, **arguments)
    assert ours.tolist() == MODEL.generate(ids, **arguments).tolist()


def test_rows_end_at_any_of_the_end_tokens_and_at_their_own_length(texts: list[list[int]]) -> None:
    first, second = texts[0][len(PROMPTS[0]) :], texts[2][len(PROMPTS[2]) :]
    ends = [first[5], second[7]]
    out = treewy.generate(
        MODEL, PROMPTS, max_new_tokens=16, do_sample=False, eos_token_id=ends, pad_token_id=1,
        drafter=KnowsTheText(texts), row_max_new_tokens=[16, 3, 16], draft_tree_widths=(2, 2), compile_options=FAST,
    )  # fmt: skip
    for row, limit in ((0, 16), (1, 3), (2, 16)):
        expected = texts[row][len(PROMPTS[row]) :][:limit]
        stop = next((i + 1 for i, token in enumerate(expected) if token in ends), limit)
        new = out[row, 9:].tolist()
        assert new[:stop] == expected[:stop]
        assert set(new[stop:]) <= {1}


def test_streamer_gets_the_prompt_and_every_token_once(texts: list[list[int]]) -> None:
    for call in (
        lambda **more: treewy.generate(MODEL, [PROMPTS[0]], **more),
        lambda **more: MODEL.generate(torch.tensor(PROMPTS[:1]), custom_generate=treewy.generate, **more),
    ):
        streamer = Collects()
        call(
            streamer=streamer,
            max_new_tokens=10,
            do_sample=False,
            drafter=KnowsTheText(texts),
            draft_tree_widths=(2, 2),
            compile_options=FAST,
        )
        assert streamer.tokens == texts[0][: len(PROMPTS[0]) + 10]
        assert streamer.ended


@pytest.mark.parametrize("end", [None, 3])
def test_a_users_own_end_and_length_criteria_take_the_place_of_transformers(texts: list[list[int]], end: int | None) -> None:
    new = texts[0][len(PROMPTS[0]) :]
    for criterion in (EosTokenCriteria(new[6]), MaxLengthCriteria(len(PROMPTS[0]) + 4)):
        arguments = {
            "max_new_tokens": 20, "do_sample": False, "stopping_criteria": StoppingCriteriaList([criterion]),
            "eos_token_id": None if end is None else new[end],
        }  # fmt: skip
        ids = torch.tensor(PROMPTS[:1])
        ours = MODEL.generate(
            ids, custom_generate=treewy.generate, drafter=KnowsTheText(texts), draft_tree_widths=(1, 1, 1),
            compile_options=FAST, **arguments,
        )  # fmt: skip
        assert ours.tolist() == MODEL.generate(ids, **arguments).tolist()


def test_stopping_criteria_see_every_token(texts: list[list[int]]) -> None:
    class StopsAt(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.tensor([input_ids.shape[1] == len(PROMPTS[0]) + 5])

    out = treewy.generate(
        MODEL, [PROMPTS[0]], max_new_tokens=20, do_sample=False, stopping_criteria=StoppingCriteriaList([StopsAt()]),
        drafter=KnowsTheText(texts), draft_tree_widths=(1, 1, 1), compile_options=FAST,
    )  # fmt: skip
    assert out[0].tolist() == texts[0][: len(PROMPTS[0]) + 5]


def test_a_processor_that_looks_at_the_batch_sees_the_row_it_scores() -> None:
    class BansByRow(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores = scores.clone()
            for row in range(len(scores)):
                scores[row, row * 64 : (row + 1) * 64] = -torch.inf
            return scores

    out = treewy.generate(
        MODEL, [[5, 6, 7], [7, 6, 5]], max_new_tokens=6, do_sample=False, draft_tree_widths=(2,),
        logits_processor=LogitsProcessorList([BansByRow()]), compile_options=FAST,
    )  # fmt: skip
    assert (out[0, 3:] >= 64).all()
    assert (out[1, 3:] < 64).all()


def test_a_seed_gives_the_same_text_whatever_the_batch_and_the_tree() -> None:
    def sampled(prompts: list[list[int]], seeds: list[int], **more: Any) -> list[list[int]]:
        longest = max(map(len, prompts))
        out = treewy.generate(
            MODEL, prompts, max_new_tokens=10, do_sample=True, temperature=0.7, top_k=20, seed=seeds,
            compile_options=FAST, **more,
        )  # fmt: skip
        return out[:, longest:].tolist()

    alone = sampled([PROMPTS[2]], [7], draft_tree_widths=(2, 2))
    known = KnowsTheText([PROMPTS[2] + alone[0]])
    among = sampled([PROMPTS[0], PROMPTS[2], PROMPTS[1]], [1, 7, 2], draft_tree_widths=(2, 2))
    assert among[1] == alone[0]
    assert sampled([PROMPTS[2]], [7], draft_tree_widths=(2, 2), drafter=known) == alone
    assert sampled([PROMPTS[2]], [8], draft_tree_widths=(2, 2)) != alone


def test_texts_of_a_padding_tokenizer_are_taken_with_their_mask() -> None:
    own = {"max_new_tokens": 4, "do_sample": False, "draft_tree_widths": (2,), "compile_options": FAST}
    out = treewy.generate(MODEL, [[0, 5, 6], [1, 2, 3]], attention_mask=[[0, 1, 1], [1, 1, 1]], **own)
    assert out[:, 3:].tolist() == [plain([5, 6], 4), plain([1, 2, 3], 4)]


def test_transformers_names_for_drafters_are_taken(texts: list[list[int]]) -> None:
    own = {"max_new_tokens": 12, "do_sample": False, "compile_options": FAST}
    prompt = [5, 6, 7, 8] * 4
    for options, depth in (({"prompt_lookup_num_tokens": 4}, 4), ({"assistant_model": MODEL, "draft_tree_widths": (1, 1)}, 2)):
        seen = GenerationStatistics()
        out = treewy.generate(MODEL, [prompt], statistics=seen, **own, **options)
        assert out[0, len(prompt) :].tolist() == plain(prompt, 12)
        assert len(seen.offered_by_depth) == depth
    # The model as its own assistant is always right.
    assert seen.tokens_per_step == 3
    with pytest.raises(ValueError, match="no weights under 'mtp"):
        treewy.generate(MODEL, [prompt], use_mtp=True, **own)
    with pytest.raises(ValueError, match="assistant_model and use_mtp: give one of them"):
        treewy.generate(MODEL, [prompt], use_mtp=True, assistant_model=MODEL, **own)


def test_an_assistant_with_room_for_other_tokens_drafts_those_of_both() -> None:
    # A text with a token that the smaller one does not know could not be drafted for.
    known = {"suppress_tokens": list(range(VOCABULARY - 8, VOCABULARY))}
    own = {"max_new_tokens": 6, "do_sample": False, "compile_options": FAST, "draft_tree_widths": (3, 2), **known}
    for vocabulary in (VOCABULARY + 72, VOCABULARY - 8):
        drafter = tiny_model(vocab_size=vocabulary, seed=9)
        out = treewy.generate(MODEL, PROMPTS, drafter=drafter, **own)
        assert out[:, 9:].tolist() == [plain(prompt, 6, **known) for prompt in PROMPTS]
        sampled = {"do_sample": True, "seed": 5, "temperature": 0.8}
        assert treewy.generate(MODEL, PROMPTS, drafter=drafter, **(own | sampled)).max() < VOCABULARY - 8
    with pytest.raises(ValueError, match="holds token 127, and the drafting model Qwen3_5ForCausalLM has a vocabulary of 120"):
        treewy.generate(MODEL, [[127]], drafter=drafter, **own)


def test_a_given_cache_goes_on_from_what_it_holds(texts: list[list[int]]) -> None:
    cache = treewy.TreeCache(MODEL.config, batch_size=1, max_length=64, max_nodes=7)
    arguments = {"do_sample": False, "draft_tree_widths": (2, 2), "compile_options": FAST, "cache": cache}
    first = treewy.generate(MODEL, [PROMPTS[0]], max_new_tokens=6, drafter=KnowsTheText(texts), **arguments)
    assert cache.lengths.tolist() == [len(PROMPTS[0]) + 5]
    longer = [*first[0].tolist(), 17, 18]
    second = treewy.generate(MODEL, [longer], max_new_tokens=6, **arguments)
    assert second[0].tolist() == longer + plain(longer, 6)


def test_steps_are_compiled_once_and_leave_with_the_model() -> None:
    import gc
    import weakref

    model = tiny_model(seed=3)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for prompt, widths in (([1, 2, 3], (2, 2)), ([4, 5], (2, 2)), ([6], (3, 1))):
        treewy.generate(model, [prompt], max_new_tokens=4, do_sample=False, draft_tree_widths=widths, compile_options=FAST)
    assert compiled_steps(model) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
