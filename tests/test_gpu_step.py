"""A whole step in one CUDA graph: other trees, lengths and rows replay it, and nothing is compiled or captured again."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny_models import VOCABULARY, tiny_model
from treewy_inductor.acceptance import greedy_accept
from treewy_inductor.backend import treewy
from treewy_inductor.captured_step import CapturedStep
from treewy_inductor.models.tree_cache import TreeCache

ROWS, NODES, ROOM = 3, 13, 128


def random_parents(rng: random.Random) -> Tensor:
    """Return ``[ROWS, NODES]`` int32: each row a random tree of its own size, the rest inert."""
    parents = torch.full((ROWS, NODES), -2, dtype=torch.int32)
    for row in range(ROWS):
        for t in range(rng.randint(1, NODES)):
            parents[row, t] = rng.randrange(t) if t else -1
    return parents


def prefilled(model: PreTrainedModel) -> TreeCache:
    cache = TreeCache(model.config, ROWS, ROOM, NODES, device="cuda")
    ids = torch.arange(ROWS * 9, device="cuda").reshape(ROWS, 9) % VOCABULARY
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    cache.prefill(model, ids, mask)
    return cache


def committed(cache: TreeCache) -> list[Tensor]:
    """Return what the rows hold: a rejected node's keys beyond a row's length are nobody's."""
    inside = (torch.arange(ROOM, device="cuda") < cache.lengths[:, None])[None, :, None, :, None]
    keys, values = (torch.where(inside, x, 0) for x in (cache.keys, cache.values))
    return [x.clone() for x in (cache.state, cache.history, keys, values, cache.lengths)]


def test_a_step_on_the_cpu_says_what_to_do_instead() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="needs a CUDA device: call the compiled model"):
        CapturedStep(model, TreeCache(model.config, 1, 32, 4, device="cpu"))


@pytest.mark.gpu
class TestCapturedStep:
    def test_a_hundred_trees_through_one_graph_equal_a_fresh_capture_and_uncaptured_steps(self) -> None:
        model = tiny_model().cuda()
        step = torch.compile(model, backend=treewy, fullgraph=True, dynamic=False)
        cache = prefilled(model)
        start = cache.snapshot()
        captured = CapturedStep(step, cache)
        rng = random.Random(0)
        trees = [random_parents(rng) for _ in range(100)]
        tokens = [torch.randint(0, VOCABULARY, (ROWS, NODES), device="cuda") for _ in trees]
        compiles = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        told = []
        for i, (parents, ids) in enumerate(zip(trees, tokens, strict=True)):
            if i % 25 == 0:
                cache.restore(start)
            told.append([x.clone() for x in (*captured(parents, ids), captured.logits)])
        replayed = committed(cache)
        assert captured.captures == 1
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiles

        cache.restore(start)
        fresh = CapturedStep(step, cache)
        for parents, ids, (path, bonus, count, logits) in zip(trees[75:], tokens[75:], told[75:], strict=True):
            for again, before in zip((*fresh(parents, ids), fresh.logits), (path, bonus, count, logits), strict=True):
                torch.testing.assert_close(again, before, rtol=0, atol=0, equal_nan=True)
        for again, before in zip(committed(cache), replayed, strict=True):
            torch.testing.assert_close(again, before, rtol=0, atol=0)

        cache.restore(start)
        for parents, ids, (path, _, _, logits) in zip(trees[75:], tokens[75:], told[75:], strict=True):
            cache.set_tree(parents.cuda())
            with torch.no_grad():
                own = step(**cache.inputs(ids)).logits
            torch.testing.assert_close(own, logits, rtol=0, atol=0, equal_nan=True)
            accepted = greedy_accept(own, cache.tokens, cache.encoding)[0]
            assert torch.equal(accepted, path)
            cache.commit(accepted)
        for again, before in zip(committed(cache), replayed, strict=True):
            torch.testing.assert_close(again, before, rtol=0, atol=0)

    def test_a_full_row_is_told_before_anything_runs(self) -> None:
        model = tiny_model().cuda()
        cache = TreeCache(model.config, ROWS, 16, NODES, device="cuda")
        cache.prefill(model, torch.ones(ROWS, 4, dtype=torch.int64, device="cuda"))
        with pytest.raises(ValueError, match="no room for 13 nodes"):
            CapturedStep(torch.compile(model, backend=treewy, fullgraph=True, dynamic=False), cache)

    def test_reduce_overhead_records_the_verification_once_and_replays_it_with_other_trees(self) -> None:
        model = tiny_model().cuda()
        cache = prefilled(model)
        step = torch.compile(model, backend=treewy, fullgraph=True, dynamic=False, mode="reduce-overhead")
        plain = torch.compile(model, backend=treewy, fullgraph=True, dynamic=False)
        rng = random.Random(1)
        ids = torch.randint(0, VOCABULARY, (ROWS, NODES), device="cuda")
        compiles = 0
        torch._dynamo.utils.counters.clear()
        for i in range(6):
            cache.set_tree(random_parents(rng))
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad(), torch._inductor.config.patch("triton.cudagraph_or_error", True):
                logits = step(**cache.inputs(ids)).logits.clone()
            with torch.no_grad():
                expected = plain(**cache.inputs(ids)).logits
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
            cache.commit(greedy_accept(expected, cache.tokens, cache.encoding)[0])
            seen = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            assert i == 0 or seen == compiles
            compiles = seen
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
        trees = torch._inductor.cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        assert trees is not None
        recorded = list(trees.get_roots())
        assert len(recorded) == 1 and not any(recorded[0].children.values())
