"""Softmax attention over a tree: the op against plain attention along each path, and ``attn_implementation="treewy"``.

The op computes float64 here, so 1e-12 is far above its rounding and far below any wrong mask.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.path_oracle import path_to
from tests.tiny_models import FAMILIES, VOCABULARY, in_dtype, tiny_model
from tests.trees import BRANCHES, CHAIN, FOREST, INERT_BETWEEN, STAR, batch_of, random_parents
from tests.verified_model import LENGTHS, TOLERANCE, VerifiedModel
from treewy_inductor import ops_attention
from treewy_inductor.encoding import derive
from treewy_inductor.models.transformers_api import CACHE_KEYWORD
from treewy_inductor.models.tree_attention import tree_attention_forward

NODES = 13


def operands(parents: Tensor, lengths: list[int], HK: int = 2, groups: int = 3, D: int = 5, E: int = 4) -> list[Any]:
    B, N = parents.shape
    L = max(lengths) + N + 2
    tensors = torch.randn(B, HK * groups, N, D), torch.randn(B, HK, L, D), torch.randn(B, HK, L, E)
    return [*(x.double() for x in tensors), derive(parents, 4)[0], torch.tensor(lengths), 0.3]


@pytest.mark.parametrize("nodes", [9, 70])
def test_every_node_attends_what_its_path_alone_would(nodes: int) -> None:
    parents = batch_of(random_parents(nodes, 1), random_parents(nodes, 2, inert=0.3), random_parents(nodes, 3))
    case = operands(parents, [0, 4, 11])
    query, keys, values, _, lengths, scale = case
    found = ops_attention.tree_attention(*case)
    for row in range(3):
        for t in range(nodes):
            if parents[row, t] == -2:
                assert (found[row, t] == 0).all()
                continue
            length = int(lengths[row])
            seen = [*range(length), *(length + node for node in path_to(parents[row].tolist(), t))]
            k, v = (x[row][:, seen].repeat_interleave(3, 0) for x in (keys, values))
            weights = (torch.einsum("hd,hld->hl", query[row, :, t], k) * scale).softmax(-1)
            torch.testing.assert_close(found[row, t], torch.einsum("hl,hle->he", weights, v), rtol=1e-12, atol=1e-12)


def test_what_may_not_be_read_may_be_nan() -> None:
    parents = batch_of(BRANCHES, INERT_BETWEEN)
    case = operands(parents, [3, 6])
    clean = ops_attention.tree_attention(*case)
    N, leaf = parents.shape[1], len(BRANCHES) - 1
    case[0].transpose(1, 2)[parents == -2] = torch.nan
    for row, length in enumerate((3, 6)):
        for rows in case[1:3]:
            rows[row, :, length + N :] = torch.nan
            rows[row, :, length + (parents[row] == -2).nonzero()[:, 0]] = torch.nan
    assert torch.equal(ops_attention.tree_attention(*case), clean)
    case[1][0, :, 3 + leaf] = case[2][0, :, 3 + leaf] = torch.inf
    keep = torch.arange(N) != leaf
    assert torch.equal(ops_attention.tree_attention(*case)[:, keep], clean[:, keep])


def test_schema_fake_and_errors() -> None:
    case = operands(batch_of(CHAIN, STAR), [3, 0])
    torch.library.opcheck(ops_attention.tree_attention, tuple(case))
    for index, wrong, message in (
        (1, case[1][:, :, :, :4], r"keys is \[2, 2, 12, 4\], expected \[2, 2, 12, 5\]"),
        (3, case[3][:1], r"ancestors is \[1, \d+, 1\], expected \[2"),
        (4, case[4][:1], r"lengths is \[1\], expected \[2\]"),
        (0, case[0].float(), "expected one dtype"),
        (0, case[0][:, :5], "5 query heads are not a multiple of 2 key heads"),
    ):
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=message):
            ops_attention.tree_attention(*case[:index], wrong, *case[index + 1 :])


@pytest.mark.parametrize("addition", [{"sliding_window": 8}, {"softcap": 30.0}, {"s_aux": torch.ones(1)}, {"dropout": 0.1}])
def test_additions_to_plain_attention_are_refused_on_a_tree(addition: dict[str, Any]) -> None:
    tree = torch.zeros(1, 1, 3, 2, dtype=torch.int64)
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match=f"attends with {next(iter(addition))}=.*load the model with"):
        tree_attention_forward(torch.nn.Module(), x, x, x, tree, **addition)


@torch.no_grad()
def test_without_a_tree_it_is_sdpa() -> None:
    ids = torch.randint(0, VOCABULARY, (2, 11))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    results = []
    for implementation in ("sdpa", "treewy"):
        model = tiny_model(attn_implementation=implementation)
        assert model.config._attn_implementation == implementation
        results.append((model(ids).logits, model(ids, attention_mask=mask).logits, model.generate(ids, max_new_tokens=5)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_model_verifies_trees_and_commits_with_it() -> None:
    torch._dynamo.reset()
    verified = VerifiedModel(tiny_model(initializer_range=0.05, attn_implementation="treewy"), NODES)
    trees = [(CHAIN, STAR, BRANCHES), (FOREST, INERT_BETWEEN, [-1]), ([*range(-1, 12)], [-1, *[0] * 12], [-1, *[-2] * 12])]
    for step, each in enumerate(trees):
        parents, tokens = batch_of(*each), torch.randint(0, VOCABULARY, (len(LENGTHS), NODES))
        found = verified.verify(parents, tokens)
        assert verified.errors(found, parents, tokens).max() < TOLERANCE
        verified.commit(parents, tokens, [2 * step, 0, 0 if step % 2 else None])
        verified.assert_rows_equal_recomputing()
    assert verified.compiled == 1
    assert verified.cache.inputs(tokens)["attention_mask"].shape == (3, 1, NODES, 2)
    assert "mask" not in vars(verified.cache)


@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid", "kimi_linear", "bamba"])
def test_other_families_verify_with_it(family: str) -> None:
    torch._dynamo.reset()
    assert family in FAMILIES
    verified = VerifiedModel(tiny_model(family, initializer_range=0.05, attn_implementation="treewy"), NODES)
    parents = torch.tensor([random_parents(NODES, row, inert=0.1) for row in range(3)])
    tokens = torch.randint(0, VOCABULARY, (3, NODES))
    assert verified.errors(verified.verify(parents, tokens), parents, tokens).max() < TOLERANCE


def test_bfloat16_is_no_farther_from_float32_than_with_sdpa() -> None:
    torch._dynamo.reset()
    model = in_dtype(tiny_model(initializer_range=0.05), torch.bfloat16)
    exact = in_dtype(model, torch.float32)
    parents = torch.tensor([random_parents(NODES, row) for row in range(3)])
    tokens = torch.randint(0, VOCABULARY, (3, NODES))
    errors = []
    for implementation in ("sdpa", "treewy"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(3)
        verified = VerifiedModel(model, NODES)
        found = verified.verify(parents, tokens)
        verified.model = exact
        errors.append(verified.errors(found, parents, tokens).square().mean().sqrt())
    assert errors[1] <= 1.1 * errors[0]


@torch.no_grad()
def test_one_model_serves_its_ordinary_cache_between_trees() -> None:
    torch._dynamo.reset()
    verified = VerifiedModel(tiny_model(initializer_range=0.05, attn_implementation="treewy"), NODES)
    parents, tokens = batch_of(CHAIN, STAR, BRANCHES), torch.randint(0, VOCABULARY, (3, NODES))
    before = verified.verify(parents, tokens)
    output = verified.model(tokens, use_cache=True)
    verified.model(tokens[:, :1], use_cache=True, **{CACHE_KEYWORD: output[CACHE_KEYWORD]})
    assert torch.equal(verified.verify(parents, tokens), before)
