"""transformers' own assisted generation on these models, with a cache that can take tokens back."""

from __future__ import annotations

import copy
import gc
import inspect

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, conversion_mapping

from tests.tiny_models import FAMILIES, tiny_model
from treewy_inductor import assisted
from treewy_inductor.models.replay_cache import ReplayCache
from treewy_inductor.models.small_model import load_small_model
from treewy_inductor.models.transformers_api import cache_keyword

MODEL = tiny_model()
MODEL.generation_config.pad_token_id = 0
PROMPT = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])


def greedy(model: PreTrainedModel = MODEL, prompt: Tensor = PROMPT, **more: object) -> list[int]:
    return model.generate(prompt, max_new_tokens=24, do_sample=False, **more)[0].tolist()


def near_copy(noise: float, model: PreTrainedModel = MODEL) -> PreTrainedModel:
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return draft


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.05])
def test_an_assistant_model_changes_no_token(noise: float) -> None:
    draft = near_copy(noise)
    runs: list[int] = []
    handle = MODEL.register_forward_pre_hook(lambda *_: runs.append(1))
    with assisted(MODEL) as arguments:
        out = greedy(assistant_model=draft, **arguments)
    handle.remove()
    assert out == greedy()
    assert len(runs) < 24 if noise < 0.01 else len(runs) <= 24


def test_prompt_lookup_changes_no_token() -> None:
    with assisted(MODEL) as arguments:
        assert greedy(prompt_lookup_num_tokens=4, **arguments) == greedy()


def test_each_call_in_a_block_is_a_text_of_its_own() -> None:
    other = PROMPT.flip(1)[:, :7]
    with assisted(MODEL) as arguments:
        for prompt in (PROMPT, other, PROMPT):
            assert greedy(prompt=prompt, prompt_lookup_num_tokens=3, **arguments) == greedy(prompt=prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    model = tiny_model(family)
    model.generation_config.pad_token_id = 0
    if cache_keyword(model) == "cache_params":
        with pytest.raises(NotImplementedError, match="use treewy"), assisted(model):
            pass
        return
    expected = greedy(model)
    with assisted(model) as arguments:
        assert greedy(model, prompt_lookup_num_tokens=3, **arguments) == expected
        # A cache of recurrent layers alone is one that transformers cannot keep for an assistant.
        assert greedy(model, assistant_model=near_copy(0.003), **arguments) == expected


def test_a_model_in_half_precision() -> None:
    model = copy.deepcopy(MODEL).bfloat16()
    with assisted(model) as arguments:
        assert greedy(model, assistant_model=near_copy(0.01, model), **arguments) == greedy(model)


@pytest.mark.skipif(
    "pre_fc_norm_embedding" not in inspect.getsource(conversion_mapping),
    reason="this transformers reads no prediction layer of this layout",
)
def test_transformers_own_use_of_the_prediction_layer_changes_no_token() -> None:
    model, tokenizer = load_small_model()
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer("def read_lines(path):\n", add_special_tokens=False)["input_ids"]]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 32, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)[0].tolist()
    runs: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: runs.append(1))
    with assisted(model) as arguments:
        out = model.generate(ids, use_mtp=True, **options, **arguments)[0].tolist()
    handle.remove()
    assert out == expected
    # One draft a forward, at least a third of them right.
    assert len(runs) < 0.75 * 32


def test_the_refusal_is_lifted_inside_the_block_alone() -> None:
    assert MODEL._is_stateful
    with assisted(MODEL):
        assert not MODEL._is_stateful
    assert MODEL._is_stateful
    assert "_is_stateful" not in vars(MODEL)
    with pytest.raises(ValueError, match="stateful"):
        greedy(prompt_lookup_num_tokens=4)


@pytest.mark.parametrize("removed", [1, 3, 5])
def test_a_cropped_cache_is_one_that_never_saw_the_tokens(removed: int) -> None:
    keyword = cache_keyword(MODEL)
    own, plain = ReplayCache(MODEL), DynamicCache(config=MODEL.config)
    with torch.no_grad():
        for cache in (own, plain):
            MODEL(PROMPT[:, :4], **{keyword: cache})
        MODEL(PROMPT[:, 4:9], **{keyword: own})
        own.crop(-removed)
        if removed < 5:
            MODEL(PROMPT[:, 4 : 9 - removed], **{keyword: plain})
        found, expected = (MODEL(PROMPT[:, :2], **{keyword: cache}).logits for cache in (own, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_only_the_last_forward_can_be_taken_back() -> None:
    cache = ReplayCache(MODEL)
    with torch.no_grad():
        MODEL(PROMPT[:, :4], **{cache_keyword(MODEL): cache})
    with pytest.raises(ValueError, match="only the 4 tokens of the last forward"):
        cache.layers[0].crop(-5)


def test_hooks_leave_with_the_cache() -> None:
    mixer = MODEL.model.layers[0].linear_attn
    gc.collect()
    before = len(mixer._forward_pre_hooks)
    cache = ReplayCache(MODEL)
    assert len(mixer._forward_pre_hooks) == before + 1
    del cache
    gc.collect()
    assert len(mixer._forward_pre_hooks) == before
