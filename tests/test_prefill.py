"""Prompts in a TreeCache: the states that the row's tokens alone would give, whatever padding, chunks and other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.tiny_models import FAMILIES, VOCABULARY, tiny_model
from treewy_inductor import TreeCache
from treewy_inductor.models.transformers_api import cache_keyword

# Batched and lone rows, and chunks, order float32 sums differently.
TOLERANCE = 3e-5
PROMPT = 70


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


def new_cache(model: PreTrainedModel, rows: int) -> TreeCache:
    return TreeCache(model.config, rows, 128, 8)


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape)


@torch.no_grad()
def assert_row_holds(cache: TreeCache, row: int, model: PreTrainedModel, tokens: Tensor) -> None:
    """Compare a row with transformers' own cache after one forward of exactly these tokens."""
    alone = DynamicCache(config=model.config)
    model(input_ids=tokens[None], use_cache=True, **{cache_keyword(model): alone})
    assert cache.lengths[row] == len(tokens)
    linear = softmax = 0
    for layer, layer_type in zip(alone.layers, model.config.layer_types, strict=True):
        if layer_type == "linear_attention":
            found = {"state": cache.state[linear, row], "history": cache.history[linear, row]}
            state = layer.recurrent_states[0][0]
            is_value_major = cache.shapes[linear + softmax].state_is_value_major
            expected = {"state": state.mT if is_value_major else state, "history": layer.conv_states[0][0]}
            linear += 1
        else:
            held = (softmax, row, slice(None), slice(0, len(tokens)))
            found = {"keys": cache.keys[held], "values": cache.values[held]}
            expected = {"keys": layer.keys[0], "values": layer.values[0]}
            softmax += 1
        for name, tensor in found.items():
            torch.testing.assert_close(
                tensor, expected[name], rtol=TOLERANCE, atol=TOLERANCE * float(expected[name].abs().max())
            )
    assert linear == cache.state.shape[0] and softmax == cache.keys.shape[0]


def test_one_forward_is_taken_over_bit_for_bit(model: PreTrainedModel) -> None:
    tokens = random_tokens(1, 21)
    cache = new_cache(model, 1)
    logits = cache.prefill(model, tokens)
    alone = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{cache_keyword(model): alone}).logits[:, -1]
    assert torch.equal(logits, expected)
    assert torch.equal(cache.state[0], alone.layers[0].recurrent_states[0])
    assert torch.equal(cache.history[2], alone.layers[2].conv_states[0])
    assert torch.equal(cache.keys[0, :, :, :21], alone.layers[3].keys)


def test_split_at_every_offset(model: PreTrainedModel) -> None:
    tokens = random_tokens(PROMPT)
    with torch.no_grad():
        expected = model(input_ids=tokens[None]).logits[0, -1]
    # A row for each offset: all of them end with the same tokens, so a wrong one stands out.
    offsets = range(1, PROMPT)
    cache = new_cache(model, len(offsets))
    for row, offset in enumerate(offsets):
        cache.prefill(model, tokens[None, :offset], rows=[row])
        last = cache.prefill(model, tokens[None, offset:], rows=[row])
        torch.testing.assert_close(last[0], expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max()))
    assert cache.lengths.tolist() == [PROMPT] * len(offsets)
    for row in (0, 1, 2, 3, len(offsets) // 2, len(offsets) - 1):
        assert_row_holds(cache, row, model, tokens)


@pytest.mark.parametrize("chunk_size", [1, 3, 64, 70, 100])
def test_chunks(model: PreTrainedModel, chunk_size: int) -> None:
    tokens = random_tokens(1, PROMPT)
    cache = new_cache(model, 1)
    cache.prefill(model, tokens, chunk_size=chunk_size)
    assert_row_holds(cache, 0, model, tokens[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_never_seen(model: PreTrainedModel, side: str) -> None:
    lengths = [70, 3, 1, 41, 3]
    prompts = [random_tokens(n) for n in lengths]
    ids, mask = random_tokens(5, PROMPT), torch.zeros(5, PROMPT, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        span = slice(PROMPT - len(prompt), None) if side == "left" else slice(0, len(prompt))
        ids[row, span], mask[row, span] = prompt, 1
    cache = new_cache(model, 5)
    logits = cache.prefill(model, ids, mask, chunk_size=16)
    for row, prompt in enumerate(prompts):
        assert_row_holds(cache, row, model, prompt)
        with torch.no_grad():
            expected = model(input_ids=prompt[None]).logits[0, -1]
        torch.testing.assert_close(logits[row], expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max()))


def test_rows_enter_and_leave(model: PreTrainedModel) -> None:
    first, second, third = random_tokens(17), random_tokens(60), random_tokens(5)
    cache = new_cache(model, 3)
    cache.prefill(model, first[None], rows=[2])
    cache.prefill(model, second[None], rows=[0])
    assert cache.lengths.tolist() == [60, 0, 17]
    # Row 0 leaves and a shorter one takes its slot, while row 2 goes on.
    cache.reset([0])
    more = random_tokens(2, 9)
    cache.prefill(model, torch.stack([third, more[0, :5]]), rows=[0, 1])
    cache.prefill(model, more[1:], rows=[2])
    assert_row_holds(cache, 0, model, third)
    assert_row_holds(cache, 1, model, more[0, :5])
    assert_row_holds(cache, 2, model, torch.cat([first, more[1]]))


def test_a_reused_slot_equals_a_fresh_one(model: PreTrainedModel) -> None:
    used, fresh = new_cache(model, 2), new_cache(model, 2)
    used.prefill(model, random_tokens(2, 100))
    used.reset()
    tokens = random_tokens(2, 30)
    assert torch.equal(used.prefill(model, tokens), fresh.prefill(model, tokens))
    for name in ("state", "history", "keys", "values", "lengths"):
        assert torch.equal(getattr(used, name), getattr(fresh, name)), name


def test_hidden_states_of_every_prompt_token(model: PreTrainedModel) -> None:
    ids = random_tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    _, hidden = new_cache(model, 2).prefill(model, ids, mask, chunk_size=6, return_hidden_states=True)
    with torch.no_grad():
        expected = [model.model(input_ids=tokens[None]).last_hidden_state[0] for tokens in (ids[0], ids[1, 13:])]
    for found, wanted in zip(hidden, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_5"])
def test_every_family(family: str) -> None:
    model = tiny_model(family)
    cache = new_cache(model, 2)
    ids, mask = random_tokens(2, 24), torch.ones(2, 24, dtype=torch.int64)
    mask[0, :7] = 0
    cache.prefill(model, ids, mask, chunk_size=10)
    assert_row_holds(cache, 0, model, ids[0, 7:])
    assert_row_holds(cache, 1, model, ids[1])


def test_refusals_leave_the_cache_as_it_was(model: PreTrainedModel) -> None:
    cache = new_cache(model, 2)
    cache.prefill(model, random_tokens(2, 20))
    before = cache.snapshot()
    empty = torch.ones(2, 4, dtype=torch.int64)
    empty[1] = 0
    refused = [
        ("row 0 holds 20 of 128 tokens, and its prompt of 109", (random_tokens(2, 109),), {}),
        (r"input_ids is \[3, 4\], expected 2 rows", (random_tokens(3, 4),), {}),
        (r"attention_mask is \[2, 3\] for input_ids of \[2, 4\]", (random_tokens(2, 4), empty[:, :3]), {}),
        ("the prompt of row 1 holds no token", (random_tokens(2, 4), empty), {}),
        ("chunk_size is 0", (random_tokens(2, 4),), {"chunk_size": 0}),
        ("row 2 is not one of the 2 rows", (random_tokens(1, 4),), {"rows": [2]}),
        ("expected each row once", (random_tokens(2, 4),), {"rows": [1, 1]}),
        ("input_ids is on meta", (random_tokens(2, 4).to("meta"),), {}),
        ("attention_mask is on meta", (random_tokens(2, 4), torch.ones(2, 4, device="meta")), {}),
        ("input_ids is torch.float32, expected numbers of tokens", (random_tokens(2, 4).float(),), {}),
    ]
    for message, arguments, options in refused:
        with pytest.raises(ValueError, match=message):
            cache.prefill(model, *arguments, **options)
    with pytest.raises(ValueError, match=r"the model is torch.bfloat16, the TreeCache torch.float32"):
        cache.prefill(tiny_model().bfloat16(), random_tokens(2, 4))
    after = cache.snapshot()
    for name in ("lengths", "state", "history", "keys", "values"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name


def test_a_model_that_raises_leaves_every_row_as_it_was(model: PreTrainedModel) -> None:
    cache = new_cache(model, 2)
    cache.prefill(model, random_tokens(2, 20))
    before = cache.snapshot()
    ids, mask = random_tokens(2, 10), torch.ones(2, 10, dtype=torch.int64)
    # The rows form two groups, of which the second fails inside the model.
    mask[1, :4] = 0
    ids[1, 6] = VOCABULARY + 1
    with pytest.raises(IndexError):
        cache.prefill(model, ids, mask)
    after = cache.snapshot()
    for name in ("lengths", "state", "history", "keys", "values"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name
