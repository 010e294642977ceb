"""Trees of the prediction layer against the layer applied to one path at a time, and the texts that come of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import treewy_inductor as treewy
from bench.prediction_depths import AppendedKeysValues
from tests.tiny_models import tiny_model
from treewy_inductor.drafting import DraftRequest
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.models.mtp_drafter import MtpDrafter
from treewy_inductor.models.multi_token_prediction import MultiTokenPrediction
from treewy_inductor.models.small_model import load_small_model, small_model_folder
from treewy_inductor.tree import DraftTree

MODEL, TOKENIZER = load_small_model()
PREDICTION = MultiTokenPrediction.of(MODEL)
TEXTS = ("import os\nimport sys\n\n\nclass Folder:\n    def __init__(self, path):\n        self.path", "    for name in", "")
PROMPTS = [[TOKENIZER.eos_token_id, *TOKENIZER(text, add_special_tokens=False)["input_ids"]] for text in TEXTS]
FAST = {"options": {"treewy.codegen": False}}


@torch.no_grad()
def hidden_of(tokens: list[int]) -> Tensor:
    return MODEL.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]


@torch.no_grad()
def literal_logits(tokens: list[int], drafted: list[int], held: int = 0) -> Tensor:
    """Return the logits after ``drafted``, one chain, the text after ``held`` read anew: no tree, no batch, no cache."""
    stored, count = AppendedKeysValues(), len(tokens) - 1 - held
    if count:
        state, ids = hidden_of(tokens)[held:-1][None], tokens[held + 1 :]
        positions = torch.arange(held + 1, len(tokens))[None]
        mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
    else:
        state, ids, positions = torch.zeros(1, 1, MODEL.config.hidden_size), tokens[-1:], torch.full((1, 1), held)
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    state = PREDICTION(torch.tensor([ids]), state, positions, mask, stored)[:, -1:]
    for depth, token in enumerate(drafted, start=1):
        seen = torch.ones(1, 1, 1, max(count, 1) + depth, dtype=torch.bool)
        state = PREDICTION(torch.tensor([[token]]), state, torch.tensor([[held + count + depth]]), seen, stored)
    return PREDICTION.logits(state)[0, -1]


def path_tokens(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.insert(0, tree.tokens[node])
        node = tree.parents[node]
    return path


def request_of(texts: list[list[int]], seen: list[int], **options: object) -> DraftRequest:
    hidden = [hidden_of(text)[before : len(text) - 1] for text, before in zip(texts, seen, strict=True)]
    rows = list(range(len(texts)))
    return DraftRequest(rows, texts, [99] * len(texts), 64, hidden_states=hidden, **options)  # type: ignore[arg-type]


def check_trees(texts: list[list[int]], trees: list[DraftTree], held: tuple[int, ...] = (0, 0, 0)) -> None:
    for text, tree, before in zip(texts, trees, held, strict=True):
        for node in range(len(tree)):
            children = tree.children(node)
            if children:
                best = literal_logits(text, path_tokens(tree, node), before).topk(len(children)).indices.tolist()
                assert [tree.tokens[child] for child in children] == best


@pytest.mark.parametrize("held", [(0, 0, 0), (9, 4, 0)])
def test_every_nodes_children_are_the_layers_best_over_steps_of_a_ragged_batch(held: tuple[int, ...]) -> None:
    drafter = MtpDrafter(PREDICTION)
    drafter.begin(3)
    # Of the first row some tokens may have been held before, of the second all but the root, and the third is a root alone.
    texts, seen = [list(prompt) for prompt in PROMPTS], list(held)
    assert list(map(len, texts[1:])) == [5, 1]
    for _ in range(3):
        request = request_of(texts, seen, widths=(3, 2, 2), held=list(held))
        trees = [draft.tree for draft in drafter.draft(request)]
        assert all(tree.parents == DraftTree.from_widths((3, 2, 2)).parents for tree in trees)
        check_trees(texts, trees, held)
        seen = [len(text) - 1 for text in texts]
        # Rows go on by different lengths, one of them along another branch than the best.
        for text, tree, node in zip(texts, trees, (len(trees[0]) - 1, 2, 0), strict=True):
            text += [*path_tokens(tree, node), 7]


def test_a_node_budget_is_spent_where_the_layer_is_surest() -> None:
    texts = [list(prompt) for prompt in PROMPTS]
    trees = [draft.tree for draft in MtpDrafter(PREDICTION).draft(request_of(texts, [0, 0, 0], node_budget=9))]
    assert all(len(tree) == 9 for tree in trees)
    check_trees(texts, trees)


def test_a_row_that_another_left_behind_drafts_as_before() -> None:
    alone, together = MtpDrafter(PREDICTION), MtpDrafter(PREDICTION)
    request = request_of([list(prompt) for prompt in PROMPTS], [0, 0, 0], widths=(2, 2))
    together.draft(request)
    text = [*PROMPTS[1], 11, 12]
    hidden = hidden_of(text)
    later = DraftRequest([1], [text], [9], 64, (2, 2), hidden_states=[hidden[len(PROMPTS[1]) - 1 : -1]])
    first = DraftRequest([0], [text], [9], 64, (2, 2), hidden_states=[hidden[:-1]])
    assert together.draft(later)[0].tree.tokens == alone.draft(first)[0].tree.tokens


def test_eager_attention_gives_the_same_trees() -> None:
    eager, _ = load_small_model()
    eager.set_attn_implementation("eager")
    request = request_of([list(prompt) for prompt in PROMPTS], [0, 0, 0], widths=(2, 2, 2))
    theirs = MtpDrafter.of(eager).draft(request)
    assert [draft.tree.tokens for draft in theirs] == [draft.tree.tokens for draft in MtpDrafter(PREDICTION).draft(request)]


@pytest.mark.parametrize("widths", [(1, 1, 1), (3, 2)])
def test_text_is_the_models_own_and_comes_in_fewer_steps(widths: tuple[int, ...]) -> None:
    statistics = GenerationStatistics()
    out = treewy.generate(
        MODEL,
        PROMPTS[:2],
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        drafter="mtp",
        draft_tree_widths=widths,
        statistics=statistics,
        compile_options=FAST,
    )
    for row, prompt in enumerate(PROMPTS[:2]):
        ids = torch.tensor([prompt])
        plain = MODEL.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert out[row, -24:].tolist() == plain[0, len(prompt) :].tolist()
    assert statistics.tokens_per_step > 1.5


def test_a_stop_string_ends_the_text_where_the_models_own_generate_ends_it() -> None:
    ids = torch.tensor(PROMPTS[:1])
    options = {
        "max_new_tokens": 48,
        "do_sample": False,
        "stop_strings": ["path = path\n        self.path ="],
        "tokenizer": TOKENIZER,
    }
    ours = treewy.generate(
        MODEL, PROMPTS[:1], drafter="mtp", draft_tree_widths=(3, 2), compile_options=FAST, eos_token_id=None, **options
    )
    theirs = MODEL.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)
    assert ours.tolist() == theirs.tolist()
    assert ours.shape[1] < ids.shape[1] + 48
    with pytest.raises(ValueError, match="pass the tokenizer too"):
        treewy.generate(MODEL, PROMPTS[:1], stop_strings=["def"])


def test_a_checkpoint_loaded_by_its_name_on_the_hub_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(small_model_folder(), repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained("someone/small", local_files_only=True)
    assert model.config.name_or_path == "someone/small"
    found = MultiTokenPrediction.of(model).state_dict()
    assert all(torch.equal(found[name].float(), weight) for name, weight in PREDICTION.state_dict().items())


def test_model_without_a_prediction_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="no weights under 'mtp\\.'"):
        MtpDrafter.of(tiny_model())


def test_missing_hidden_states_are_an_error() -> None:
    request = request_of([list(PROMPTS[0])], [1], widths=(2,))
    with pytest.raises(ValueError, match="new hidden states for"):
        MtpDrafter(PREDICTION).draft(request)
