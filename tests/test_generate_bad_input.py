"""What is wrong with an argument of treewy.generate is said in one sentence, and a cache that was given is usable afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import treewy_inductor as treewy
from tests.tiny_models import VOCABULARY, in_dtype, tiny_model
from treewy_inductor.drafting import Draft, DraftRequest
from treewy_inductor.tree import DraftTree

FAST = {"options": {"treewy.codegen": False}}
MODEL = tiny_model()
MODEL.generation_config.pad_token_id = 0
PROMPT = [5, 6, 7]
CACHE = treewy.TreeCache(MODEL.config, batch_size=1, max_length=64, max_nodes=7)
OWN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "draft_tree_widths": (2, 2), "compile_options": FAST}
TEXT = MODEL.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)[0].tolist()


def check_cache(cache: Any = CACHE) -> None:
    """Go on from whatever the cache holds."""
    held = int(cache.lengths[0])
    assert held <= len(TEXT) - 6
    known = max(held + 1, len(PROMPT))
    out = treewy.generate(MODEL, [TEXT[:known]], cache=cache, **OWN)
    assert out[0].tolist() == TEXT[: known + 4]
    cache.reset()


def refused(message: str, prompts: Any = (PROMPT,), error: type[Exception] = ValueError, **options: Any) -> None:
    given = OWN | {"cache": CACHE} | options
    if "draft_node_budget" in options and "draft_tree_widths" not in options:
        del given["draft_tree_widths"]
    prompts = [list(prompt) for prompt in prompts] if isinstance(prompts, tuple) else prompts
    with pytest.raises(error, match=message) as found:
        treewy.generate(MODEL, prompts, **given)
    assert "\n" not in str(found.value)
    check_cache()


class Answers:
    def __init__(self, answer: Callable[[DraftRequest], Any]) -> None:
        self.draft = answer


def late(tree: Callable[[list[int]], Any]) -> Callable[[list[int]], Any]:
    """Return a drafter whose third tree is ``tree``."""
    calls: list[int] = []

    def draft(tokens: list[int]) -> Any:
        calls.append(len(tokens))
        return tree(tokens) if len(calls) == 3 else DraftTree([-1, 0], [tokens[-1], 1])

    return draft


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tree_width": (2, 2)}, "draft_tree_width"),
        ({"draft_node_budget": 500}, "expected 2 to 256"),
        ({"draft_node_budget": 4.5}, "draft_node_budget is 4.5, expected a whole number"),
        ({"draft_tree_widths": (2, 2), "draft_node_budget": 8}, "give one of them"),
        ({"draft_tree_widths": 3}, "draft_tree_widths is 3: give the children"),
        ({"draft_tree_widths": "2,2"}, "draft_tree_widths is '2,2': give the children"),
        ({"draft_tree_widths": (2.5,)}, r"draft_tree_widths\[0\] is 2.5, expected a whole number"),
        ({"draft_tree_widths": (2, 0)}, r"widths\[1\] is 0, expected at least 1"),
        ({"draft_tree_widths": (3, 3)}, r"draft_tree_widths \(3, 3\) makes trees of 13 nodes, the TreeCache verifies 7"),
        ({"max_new_tokens": 60}, "needs 7 more for a tree, the TreeCache holds 64"),
        ({"max_new_tokens": 2.5}, "max_length is 5.5, expected a whole number"),
        ({"num_beams": 2}, "num_beams is 2"),
        ({"seed": [1, 2], "do_sample": True}, "seed has 2 entries for 1 rows"),
        ({"seed": 1.5, "do_sample": True}, "seed is 1.5, expected a whole number"),
        ({"seed": "abc", "do_sample": True}, "seed is 'abc', expected a whole number"),
        ({"seed": 2**70, "do_sample": True}, "expected a number of 64 bits"),
        ({"row_max_new_tokens": [1, 2]}, "row_max_new_tokens has 2 entries"),
        ({"row_max_new_tokens": [-1]}, r"row_max_new_tokens\[0\] is -1, expected at least 0"),
        ({"row_max_new_tokens": 3}, "row_max_new_tokens is 3: give a list"),
        ({"compile_options": {"dynamic": True}}, "compile_options is {'dynamic': True}, expected a dictionary"),
        ({"compile_options": {"options": {"treewy.code": True}}}, "option treewy.code=True is not known"),
        ({"inputs_embeds": torch.zeros(1, 3, 48)}, "passes tokens alone to the model, not inputs_embeds"),
        ({"cache": DynamicCache(config=MODEL.config)}, "is a DynamicCache: give treewy.generate a TreeCache"),
        ({"cache": treewy.TreeCache(tiny_model(num_hidden_layers=8).config, 1, 64, 7)}, "has 4 layers, the TreeCache 8"),
        ({"cache": treewy.TreeCache(tiny_model(linear_key_head_dim=16).config, 1, 64, 7)}, "in layer 0, the TreeCache"),
        ({"cache": treewy.TreeCache(MODEL.config, 1, 64, 7, dtype=torch.bfloat16)}, "the TreeCache torch.bfloat16"),
    ],
)
def test_an_option_is_refused(options: dict[str, Any], message: str) -> None:
    refused(message, **options)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "the prompt of row 0 is empty"),
        ([], "input_ids holds no prompt"),
        (torch.zeros(1, 0, dtype=torch.int64), "the prompt is empty in each of 1 rows"),
        (torch.zeros(0, 3, dtype=torch.int64), r"input_ids is \[0, 3\]"),
        (torch.tensor([1, 2, 3]), r"input_ids is \[3\], expected \[rows, length\]"),
        (torch.tensor([[1.0, 2.0]]), "input_ids is torch.float32, expected whole numbers"),
        ([1, 2, 3], "the prompt of row 0 is 1, expected a list of tokens"),
        ("text", "input_ids is a str: give a tensor"),
        (["text"], "the prompt of row 0 is 'text', expected a list of tokens: encode"),
        ([[1.5, 2]], "token 0 of the prompt of row 0 is 1.5, expected a whole number"),
        (None, "input_ids is a NoneType"),
        ([[1, VOCABULARY]], "token 1 of the prompt of row 0 is 128, outside the vocabulary of 128"),
        ([[1, -1]], "token 1 of the prompt of row 0 is -1, outside the vocabulary of 128"),
        ([[1], [2]], "the TreeCache has 1 rows for 2 prompts"),
    ],
)
def test_a_prompt_is_refused(prompts: Any, message: str) -> None:
    refused(message, prompts)


def test_a_mask_that_does_not_fit_is_refused() -> None:
    refused("attention_mask is", torch.tensor([[1, 2, 3]]), attention_mask=torch.ones(1, 2))
    refused("attention_mask has rows of", [[1, 2, 3]], attention_mask=[[1, 1]])
    refused("the prompt of row 0 is empty", torch.tensor([[1, 2]]), attention_mask=torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("ngram", "expected 'prompt_lookup'"),
        ("mtp", "no weights under 'mtp.'"),
        (3, "drafter is a int: pass a callable"),
        (Answers(lambda request: None), "drafter Answers returned a NoneType: return a list with one tree a row"),
        (Answers(lambda request: DraftTree([-1], [1])), "drafter Answers returned a DraftTree: return a list"),
        (Answers(lambda request: []), "drafter Answers returned 0 trees for 1 rows"),
        (late(lambda tokens: None), "returned no tokens for row 0"),
        (late(lambda tokens: DraftTree([-1, 0])), "returned no tokens for row 0"),
        (late(lambda tokens: DraftTree([-1, 0], [tokens[-1], VOCABULARY])), "token 128 at node 1 of row 0, outside the vocab"),
        (
            late(lambda tokens: DraftTree([-1, 0], [tokens[-1], -5])),
            "token -5 at node 1 of row 0, outside the vocabulary of 128",
        ),
        (late(lambda tokens: DraftTree([-1, 0], [tokens[-1], 1.5])), r"tokens\[1\] is 1.5, expected an integer"),
        (late(lambda tokens: DraftTree([-1, 2], [tokens[-1], 1])), r"parents\[1\] is 2, which is not before node 1"),
        (late(lambda tokens: DraftTree([-1], [tokens[-1] + 1])), "node 0 is the token accepted last"),
        (late(lambda tokens: DraftTree([-1] + [0] * 9, [tokens[-1], *range(9)])), "returned 10 nodes for row 0"),
    ],
)
def test_a_drafter_is_refused(drafter: Any, message: str) -> None:
    refused(message, drafter=drafter, max_new_tokens=12)


def even(change: Callable[[Tensor], Tensor] = lambda rows: rows) -> Tensor:
    """Return the distributions of a tree of two siblings, all tokens as probable, after ``change``."""
    rows = torch.full((3, VOCABULARY), 1 / VOCABULARY, dtype=torch.float64)
    # Nodes without children need none.
    rows[1:] = 0
    return change(rows)


def with_one(value: float, token: int = 9) -> Tensor:
    return even(lambda rows: rows.index_put((torch.tensor(0), torch.tensor(token)), torch.tensor(value, dtype=rows.dtype)))


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        (even()[:2], r"probabilities \[2, 128\] for row 0, expected \[3, 128\]"),
        (even().tolist(), "probabilities of row 0 as a list: return a tensor of floats"),
        (even().long(), "probabilities of row 0 as torch.int64: return a tensor of floats"),
        (even(lambda rows: rows * torch.nan), "from nan on that sum to nan"),
        (with_one(torch.nan), "from nan on that sum to nan"),
        (with_one(torch.inf), "that sum to inf"),
        (with_one(-0.1), "node 0 of row 0 probabilities from -0.1 on"),
        (even(lambda rows: rows * 2), "that sum to 2: they must be at least 0 and sum to 1"),
        (even(lambda rows: rows * 0), "that sum to 0"),
        (with_one(0.0, token=6), "drew token 6 under node 0 of row 0, to which it gave probability 0"),
    ],
)
def test_probabilities_that_are_none_are_refused(probabilities: Any, message: str) -> None:
    def drawn(tokens: list[int]) -> Draft:
        return Draft(DraftTree([-1, 0, 0], [tokens[-1], 5, 6]), probabilities)

    refused(message, drafter=late(drawn), do_sample=True, seed=1, max_new_tokens=12, top_k=1)


def test_proper_probabilities_are_taken_in_any_precision() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        own = OWN | {"do_sample": True, "seed": 1, "cache": CACHE}
        probabilities = even().to(dtype)
        treewy.generate(MODEL, [PROMPT], drafter=lambda t: Draft(DraftTree([-1, 0, 0], [t[-1], 5, 6]), probabilities), **own)  # noqa: B023
        CACHE.reset()


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True}, {"repetition_penalty": 1.1}])
def test_nan_scores_are_refused_and_commit_nothing(options: dict[str, Any]) -> None:
    weight = MODEL.get_output_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    try:
        with pytest.raises(ValueError, match="row 0 after 3 tokens are NaN"):
            treewy.generate(MODEL, [PROMPT], cache=CACHE, **(OWN | options))
        assert CACHE.lengths.tolist() == [2]
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    check_cache()


def test_scores_that_leave_no_token_to_sample_are_refused() -> None:
    def bans_all_after_five(ids: Tensor, scores: Tensor) -> Tensor:
        return scores - torch.inf if ids.shape[1] >= 5 else scores

    own = {"do_sample": True, "top_k": 1, "temperature": 1e-3, "logits_processor": [bans_all_after_five]}
    refused("row 0 after 5 tokens are NaN, or leave no token to sample", **own)


def test_what_a_drafter_raises_goes_through() -> None:
    refused("division by zero", error=ZeroDivisionError, drafter=late(lambda tokens: 1 / 0), max_new_tokens=12)


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="model is a Linear: give a causal language model"):
        treewy.generate(torch.nn.Linear(3, 3), [PROMPT], max_new_tokens=4)
    with pytest.raises(ValueError, match=r"the model is torch\.bfloat16"):
        treewy.generate(in_dtype(MODEL, torch.bfloat16), [PROMPT], cache=CACHE, **OWN)
    check_cache()
