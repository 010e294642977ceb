"""Steps replayed as graphs: the same text as decided step by step and as the model's own.

Without a CUDA device a graph is stood in for by running the captured function again, which is what a replay does; the tests
marked gpu replay real graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import treewy_inductor as treewy
from tests.replayed_graphs import RunsAgain, captured, decisions, generate, plain
from tests.tiny_models import VOCABULARY, tiny_model
from treewy_inductor.captured_decoding import CapturedDecoding, CapturedVerification
from treewy_inductor.drafting import DraftRequest
from treewy_inductor.models import model_verifier
from treewy_inductor.tree import DraftTree

__all__ = ["captured"]

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8], [3], [11, 12, 13, 14]]


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


def converse(model: Any) -> list[type]:
    """Go on from what a cache, and a fork of it, hold, and go back; return the kinds of graphs that were captured."""
    cache = treewy.TreeCache(model.config, batch_size=1, max_length=96, max_nodes=15, device=model.device)
    text, own = [5, 6, 7, 8], {"do_sample": False, "draft_tree_widths": (2, 2, 2)}
    for turn in range(3):
        expected = plain(model, text, 12)
        scripted = Scripted([text + expected])
        fork, kept = cache.fork([0]), cache.snapshot()
        for given in (cache, fork):
            new, seen = generate(model, [text], 10, drafter=scripted, cache=given, **own)
            assert new == [expected[:10]]
            assert seen.tokens_per_step > 1.5
        cache.restore(kept)
        assert generate(model, [text], 9, drafter=scripted, cache=cache, **own)[0] == [expected[:9]]
        assert cache.lengths.tolist() == [len(text) + 8]
        text = [*text, *expected[:9], 17 + turn]
    return [type(graph) for graphs in model_verifier._graphs.values() for graph in graphs.values()]


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

    def test_a_conversation_and_its_forks(self, captured: list[RunsAgain]) -> None:
        assert set(converse(self.model)) == {CapturedDecoding}
        # A cache is captured once, however often it is gone back to.
        assert len(captured) == decisions(captured) == 4

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

    def test_a_conversation_and_its_forks(self) -> None:
        assert set(converse(tiny_model().cuda())) == {CapturedDecoding}
