"""The shipped model's prediction layer drafting inside a step's graph: the trees and texts of drafting on the host.

As in test_captured_decoding.py, only the tests marked gpu replay real graphs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import treewy_inductor as treewy
from bench.held_out_drafting import until_end
from tests.replayed_graphs import RunsAgain, captured, decisions, generate, plain
from treewy_inductor.models.mtp_drafter import MtpDrafter
from treewy_inductor.models.mtp_on_device import MtpOnDevice
from treewy_inductor.models.multi_token_prediction import MultiTokenPrediction
from treewy_inductor.models.small_model import load_small_model

__all__ = ["captured"]


def small_prompts() -> list[list[int]]:
    """Return prompts for the small model, one of them the token alone that begins a text."""
    tokenizer = load_small_model()[1]
    texts = (
        "import os\nimport sys\n\n\nclass Folder:\n    def __init__(self, path):\n        self.path",
        "    for name in",
        "",
    )
    return [[tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]


class TestPredictionLayerOnTheDevice:
    """The small model's own layer, drafting inside the graph."""

    model = load_small_model()[0]
    prompts = small_prompts()

    @pytest.mark.parametrize("widths", [(1, 1, 1), (3, 2)])
    def test_trees_are_those_of_the_host(self, captured: list[RunsAgain], widths: tuple[int, ...]) -> None:
        own = {"do_sample": False, "drafter": "mtp", "draft_tree_widths": widths, "eos_token_id": None}
        new, seen = generate(self.model, self.prompts, 14, **own)
        known, steps = generate(self.model, self.prompts, 14, **own, cuda_graph=False)
        assert new == known == [plain(self.model, prompt, 14, eos_token_id=None) for prompt in self.prompts]
        # Only where a text ends is a tree of the host cut: the last step of each row.
        assert seen.forwards == steps.forwards
        assert seen.tokens_by_step == steps.tokens_by_step
        assert len(captured) == decisions(captured) == 1
        # Again with other prompts in the same buffers.
        other = [self.prompts[1], self.prompts[2], self.prompts[0]]
        assert generate(self.model, other, 14, **own)[0] == [known[1], known[2], known[0]]
        assert len(captured) == 1

    def test_trees_behind_held_tokens_are_those_of_the_host(self, captured: list[RunsAgain]) -> None:
        prompts = [self.prompts[1], self.prompts[0]]
        own = {"do_sample": False, "drafter": "mtp", "draft_tree_widths": (3, 2), "eos_token_id": None}
        cache = treewy.TreeCache(self.model.config, batch_size=2, max_length=128, max_nodes=10)
        cache.prefill(self.model, torch.tensor([prompts[1][:9]]), rows=[1])
        kept, runs = cache.snapshot(), []
        for graph in (None, False):
            runs.append(generate(self.model, prompts, 14, **own, cache=cache, cuda_graph=graph))
            cache.restore(kept)
        assert runs[0][0] == runs[1][0] == [plain(self.model, prompt, 14, eos_token_id=None) for prompt in prompts]
        assert runs[0][1].tokens_by_step == runs[1][1].tokens_by_step
        # The first row is done before the other begins: its buffers hold what it had, and no NaN comes of it.
        last, _ = generate(self.model, prompts, 6, **own, cache=cache, row_max_new_tokens=[0, 6])
        assert last[1] == runs[0][0][1][:6]
        assert decisions(captured) == 1

    def test_rows_end_at_an_end_token(self, captured: list[RunsAgain]) -> None:
        text = plain(self.model, self.prompts[0], 20, eos_token_id=None)
        own = {
            "do_sample": False,
            "drafter": "mtp",
            "draft_tree_widths": (2, 2),
            "eos_token_id": [text[6], 3],
            "pad_token_id": 0,
        }
        new, _ = generate(self.model, self.prompts[:2], 20, **own)
        assert until_end(new[0], text[6]) == until_end(text, text[6])

    def test_sampled_text_of_best_drafts_is_the_seeds(self, captured: list[RunsAgain]) -> None:
        own = {"do_sample": True, "temperature": 0.6, "top_k": 0, "seed": 3, "eos_token_id": None}
        drafter = MtpDrafter(MultiTokenPrediction.of(self.model), sample=False)
        new, seen = generate(self.model, self.prompts, 16, drafter=drafter, draft_tree_widths=(2, 2), **own)
        assert new == generate(self.model, self.prompts, 16, draft_tree_widths=(1,), cuda_graph=False, **own)[0]
        assert decisions(captured) == 1
        assert seen.tokens_per_step > 1.5

    def test_drawn_drafts_are_walked_after_the_captured_verification(self, captured: list[RunsAgain]) -> None:
        own = {"do_sample": True, "temperature": 0.6, "top_k": 0, "seed": 3, "drafter": "mtp", "draft_tree_widths": (2, 2)}
        new, seen = generate(self.model, self.prompts[:2], 12, **own)
        assert new == generate(self.model, self.prompts[:2], 12, cuda_graph=False, **own)[0]
        assert seen.tokens_per_step > 1.5
        assert sum(graph.replays for graph in captured) == seen.forwards

    def test_both_functions_are_one_graph_each(self) -> None:
        prediction = MultiTokenPrediction.of(self.model)
        own = MtpOnDevice(MtpDrafter(prediction), 2, 40, (2, 2), compiled=False)
        whole = {
            name: torch.compile(getattr(own, name), backend="aot_eager", fullgraph=True, dynamic=False)
            for name in ("_draft", "_take")
        }
        lengths = torch.tensor([3, 9])
        state = own._root.normal_(), own._keys.normal_(), own._values.normal_()
        before = [tensor.clone() for tensor in state]
        hidden, path = (
            torch.randn(2, 7, self.model.config.hidden_size),
            torch.tensor([[0, 2, 5], [0, 1, -1]], dtype=torch.int32),
        )
        found: list[list[Tensor]] = []
        for functions in ({"_draft": own._draft, "_take": own._take}, whole):
            for tensor, kept in zip(state, before, strict=True):
                tensor.copy_(kept)
            own._draft, own._take = functions["_draft"], functions["_take"]
            own._first.copy_(torch.tensor([1, 4]))
            tokens = own.draft(torch.tensor([4, 5]), lengths)
            own.take(hidden, path, torch.tensor([[7, 8, 9], [3, 4, 5]]), torch.tensor([3, 2]), lengths + 3)
            found.append([tokens, *(tensor.clone() for tensor in state)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.gpu
class TestGraphs:
    """Real graphs and generated code."""

    # In one of the two, equal layers are compiled once.
    @pytest.mark.parametrize(("widths", "outline"), [((1, 1, 1), False), ((3, 2, 2), True)])
    def test_the_small_model_drafts_and_verifies_in_one_graph(self, widths: tuple[int, ...], outline: bool) -> None:
        model, prompts = load_small_model(device="cuda")[0], small_prompts()
        own = {"do_sample": False, "drafter": "mtp", "draft_tree_widths": widths, "eos_token_id": None}
        own["compile_options"] = {"options": {"treewy.outline": outline}}
        new, seen = generate(model, prompts, 40, **own)
        expected = [plain(model, prompt, 40, eos_token_id=None) for prompt in prompts]
        assert new == expected
        uncaptured, steps = generate(model, prompts, 40, **own, cuda_graph=False)
        assert uncaptured == expected
        assert seen.tokens_by_step == steps.tokens_by_step
        assert seen.tokens_per_step > 2
