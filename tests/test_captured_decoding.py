"""Steps replayed as graphs: the same text as decided step by step and as the model's own, drafts on the host or the device.

Without a CUDA device a graph is stood in for by running the captured function again, which is what a replay does; the tests
marked gpu replay real graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import treewy_inductor as treewy
from bench.held_out_drafting import until_end
from tests.tiny_models import VOCABULARY, tiny_model
from treewy_inductor import graph_capture
from treewy_inductor.captured_decoding import CapturedDecoding, CapturedVerification
from treewy_inductor.drafting import DraftRequest
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.models import model_verifier
from treewy_inductor.models.mtp_drafter import MtpDrafter
from treewy_inductor.models.mtp_on_device import MtpOnDevice
from treewy_inductor.models.multi_token_prediction import MultiTokenPrediction
from treewy_inductor.models.small_model import load_small_model
from treewy_inductor.tree import DraftTree

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8], [3], [11, 12, 13, 14]]


class RunsAgain:
    """A graph whose replay runs the function and puts its results where the first run's lie."""

    def __init__(self, run: Callable[[], Any], captured: list[RunsAgain]) -> None:
        # The runs before a capture must leave no trace either.
        self.run, self.results = run, (run(), run())[1]
        self.replays = 0
        captured.append(self)

    def replay(self) -> None:
        self.replays += 1
        for kept, new in zip(self.results, self.run(), strict=True):
            if kept is not None:
                kept.copy_(new)

    def pool(self) -> None:
        return None


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RunsAgain]]:
    """Let steps be captured on the CPU; gives the stand-ins."""
    graphs: list[RunsAgain] = []

    def capture(run: Callable[[], Any], pool: Any = None) -> tuple[RunsAgain, Any]:
        graph = RunsAgain(run, graphs)
        return graph, graph.results

    def on_device(drafter: MtpDrafter, rows: int, places: int, widths: tuple[int, ...]) -> MtpOnDevice:
        return MtpOnDevice(MtpDrafter(drafter.prediction), rows, places, widths, compiled=False)

    monkeypatch.setattr(graph_capture, "capture_graph", capture)
    monkeypatch.setattr(model_verifier, "can_capture", lambda cache, options: True)
    monkeypatch.setattr(MtpDrafter, "captured", on_device)
    yield graphs
    model_verifier._graphs.clear()


class Scripted:
    """Drafts a row's true continuation and a wrong sibling at each level, wrong from a level on that changes by step."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts, self.step = texts, 0

    def draft(self, request: DraftRequest) -> list[DraftTree]:
        self.step += 1
        trees = []
        for tokens in request.tokens:
            text = next(text for text in self.texts if text[: len(tokens)] == tokens)
            follows = [*text[len(tokens) :], 0, 0, 0][: 1 + self.step % 3]
            wrong = [(token + 1) % VOCABULARY for token in follows]
            paths = [[*follows[:i], other] for i, other in enumerate(wrong)]
            trees.append(DraftTree.from_paths(tokens[-1], [*paths, follows] if self.step % 4 else paths))
        return trees


def generate(model: Any, prompts: list[list[int]], count: int, **options: Any) -> tuple[list[list[int]], GenerationStatistics]:
    """Return each row's new tokens."""
    statistics = GenerationStatistics()
    cpu = {"compile_options": {"options": {"treewy.codegen": False}}} if model.device.type == "cpu" else {}
    out = treewy.generate(model, prompts, max_new_tokens=count, statistics=statistics, **cpu, **options)
    return out[:, max(map(len, prompts)) :].tolist(), statistics


def plain(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


def small_prompts() -> list[list[int]]:
    """Return prompts for the small model, one of them the token alone that begins a text."""
    tokenizer = load_small_model()[1]
    texts = (
        "import os\nimport sys\n\n\nclass Folder:\n    def __init__(self, path):\n        self.path",
        "    for name in",
        "",
    )
    return [[tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]


def decisions(graphs: list[RunsAgain]) -> int:
    return sum(len(graph.results) == 3 for graph in graphs)


class TestOnTheHost:
    """The loop, on stand-ins for graphs."""

    model = tiny_model()
    model.generation_config.pad_token_id = 0

    def texts(self, count: int) -> list[list[int]]:
        return [prompt + plain(self.model, prompt, count) for prompt in PROMPTS]

    def test_a_ragged_batch_whose_rows_end_at_different_steps(self, captured: list[RunsAgain]) -> None:
        texts = self.texts(24)
        ends = [texts[0][len(PROMPTS[0]) + 6], texts[2][len(PROMPTS[2]) + 9]]
        own = {"do_sample": False, "draft_node_budget": 8, "eos_token_id": ends, "row_max_new_tokens": [20, 7, 20]}
        new, seen = generate(self.model, PROMPTS, 20, drafter=Scripted(texts), **own)
        for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
            expected = text[len(prompt) :][: (20, 7, 20)[row]]
            stop = next((i + 1 for i, token in enumerate(expected) if token in ends), len(expected))
            assert new[row][:stop] == expected[:stop]
            assert set(new[row][stop:]) <= {0}
        assert len(captured) == decisions(captured) == 1
        assert captured[0].replays == seen.forwards
        assert seen.tokens_per_step > 1.5
        # Another text of the same sizes is another replay.
        again, _ = generate(self.model, PROMPTS, 20, drafter=Scripted(texts), **own)
        assert again == new
        assert len(captured) == 1

    def test_captured_and_uncaptured_steps_do_the_same(self, captured: list[RunsAgain]) -> None:
        texts = self.texts(24)
        runs = [
            generate(self.model, PROMPTS, 20, do_sample=False, drafter=Scripted(texts), draft_node_budget=8, cuda_graph=graph)
            for graph in (None, False)
        ]
        assert runs[0][0] == runs[1][0]
        assert runs[0][1].tokens_by_step == runs[1][1].tokens_by_step
        assert len(captured) == 1

    @pytest.mark.parametrize(
        ("options", "whole_steps"),
        [
            ({"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01}, 1),
            ({"temperature": 0.7, "repetition_penalty": 1.2}, 0),
            ({"typical_p": 0.9}, 0),
        ],
    )
    def test_a_seeds_text_is_the_same(self, captured: list[RunsAgain], options: dict[str, Any], whole_steps: int) -> None:
        known = generate(self.model, PROMPTS, 12, do_sample=True, seed=[4, 5, 6], cuda_graph=False, **options)[0]
        texts = [prompt + new for prompt, new in zip(PROMPTS, known, strict=True)]
        own = {"do_sample": True, "seed": [4, 5, 6], "drafter": Scripted(texts), "draft_tree_widths": (2, 2, 2)}
        new, seen = generate(self.model, PROMPTS, 12, **own, **options)
        assert new == known
        assert decisions(captured) == whole_steps
        assert len(captured) == 1
        assert seen.tokens_per_step > 1.5

    def test_what_the_host_decides_is_decided_after_the_captured_verification(self, captured: list[RunsAgain]) -> None:
        ids = torch.tensor(PROMPTS[:1])
        arguments = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
        own = {"custom_generate": treewy.generate, "compile_options": {"options": {"treewy.codegen": False}}}
        text = PROMPTS[0] + plain(self.model, PROMPTS[0], 12, repetition_penalty=1.3)
        ours = self.model.generate(ids, **arguments, repetition_penalty=1.3, drafter=Scripted([text]), **own)
        theirs = self.model.generate(ids, **arguments, repetition_penalty=1.3)
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        torch.testing.assert_close(torch.stack(ours.scores), torch.stack(theirs.scores), rtol=1e-4, atol=1e-4)
        assert decisions(captured) == 0
        assert len(captured) == 1

    def test_a_cache_is_usable_after_nan_scores_in_a_graph(self, captured: list[RunsAgain]) -> None:
        model = tiny_model(seed=5)
        cache = treewy.TreeCache(model.config, batch_size=1, max_length=64, max_nodes=7)
        own = {"draft_tree_widths": (2, 2), "past_key_values": cache, "do_sample": False}
        weight = model.get_output_embeddings().weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(torch.nan)
        with pytest.raises(ValueError, match="row 0 after 3 tokens are NaN"):
            generate(model, [[1, 2, 3]], 4, **own)
        assert cache.lengths.tolist() == [2]
        with torch.no_grad():
            weight.copy_(kept)
        assert generate(model, [[1, 2, 3]], 4, **own)[0] == [plain(model, [1, 2, 3], 4)]
        assert len(captured) == 1

    def test_graphs_leave_with_the_cache_and_the_model(self, captured: list[RunsAgain]) -> None:
        cache = treewy.TreeCache(self.model.config, batch_size=1, max_length=64, max_nodes=7)
        for width in range(1, 10):
            generate(
                self.model, [[1, 2]], 2, do_sample=True, top_k=width, draft_tree_widths=(2,), past_key_values=cache, seed=0
            )
            cache.reset()
        assert len(captured) == 9
        assert len(model_verifier._graphs[cache]) == model_verifier.MOST_GRAPHS

    def test_moved_weights_are_captured_again(self, captured: list[RunsAgain]) -> None:
        model = tiny_model(seed=7)
        first = generate(model, [[1, 2, 3]], 6, do_sample=False)[0]
        assert generate(model, [[1, 2, 3]], 6, do_sample=False)[0] == first
        assert len(captured) == 1
        moved = model.model.norm.weight.detach().clone()
        model.model.norm.weight = torch.nn.Parameter(moved)
        assert generate(model, [[1, 2, 3]], 6, do_sample=False)[0] == first
        assert len(captured) == 2

    def test_capturing_on_the_cpu_is_refused(self) -> None:
        with pytest.raises(ValueError, match="cuda_graph is True on cpu"):
            generate(self.model, [[1, 2]], 2, cuda_graph=True)


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

    def test_greedy_and_sampled_texts_of_host_drafts(self) -> None:
        model = tiny_model().cuda()
        model.generation_config.pad_token_id = 0
        texts = [prompt + plain(model, prompt, 24) for prompt in PROMPTS]
        own = {"do_sample": False, "draft_tree_widths": (2, 2, 2)}
        compiles = []
        for rows in ([20, 7, 20], [20, 20, 5]):
            new, seen = generate(model, PROMPTS, 20, drafter=Scripted(texts), row_max_new_tokens=rows, **own)
            for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
                assert new[row][: rows[row]] == text[len(prompt) :][: rows[row]]
            assert seen.tokens_per_step > 1.5
            compiles.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert compiles[0] == compiles[1]
        uncaptured = generate(model, PROMPTS, 20, drafter=Scripted(texts), cuda_graph=False, **own)[0]
        assert uncaptured == [text[len(prompt) :][:20] for prompt, text in zip(PROMPTS, texts, strict=True)]

        warped = {"do_sample": True, "temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "seed": 3}
        sampled = generate(model, PROMPTS, 12, draft_tree_widths=(2, 2, 2), cuda_graph=False, **warped)[0]
        known = [prompt + text for prompt, text in zip(PROMPTS, sampled, strict=True)]
        assert generate(model, PROMPTS, 12, draft_tree_widths=(2, 2, 2), drafter=Scripted(known), **warped)[0] == sampled
        (graphs,) = model_verifier._graphs.values()
        assert [type(graph) for graph in graphs.values()] == [CapturedDecoding, CapturedDecoding]

        penalty = {"do_sample": False, "repetition_penalty": 1.3, "draft_tree_widths": (2, 2, 2)}
        new = generate(model, PROMPTS, 12, **penalty)[0]
        assert new == [plain(model, prompt, 12, repetition_penalty=1.3) for prompt in PROMPTS]
        assert type(list(graphs.values())[-1]) is CapturedVerification

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
