"""Every other family, unmodified and compiled: a tree's logits and what is committed equal the plain model over each path."""

from __future__ import annotations

import pytest
import torch

import treewy_inductor as treewy
from tests.tiny_models import FAMILIES, VOCABULARY, tiny_model
from tests.trees import random_parents
from tests.verified_model import TOLERANCE, VerifiedModel
from treewy_inductor import records
from treewy_inductor.backend import treewy as backend

NODES = 9


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_5"])
def test_verifies_and_commits_like_the_plain_model(family: str) -> None:
    torch._dynamo.reset()
    verified = VerifiedModel(tiny_model(family, initializer_range=0.05), NODES)
    with records.collect() as found:
        for step in range(2):
            parents = torch.tensor([random_parents(NODES, 3 * step + row, inert=0.1) for row in range(3)])
            tokens = torch.randint(0, VOCABULARY, (3, NODES))
            logits = verified.verify(parents, tokens)
            assert verified.errors(logits, parents, tokens).max() < TOLERANCE
            verified.commit(parents, tokens, [max((row >= -1).nonzero()).item() for row in parents])
            verified.assert_rows_equal_recomputing()
    assert verified.compiled == 1
    linear = verified.cache.linear_layers
    proven = [record.kind for record in found if isinstance(record, records.Proven)]
    assert proven.count("causal_conv1d") == linear and len(proven) == len(found) == 2 * linear
    assert_rejected_and_padded_nodes_are_not_read(verified)


def assert_rejected_and_padded_nodes_are_not_read(verified: VerifiedModel) -> None:
    """Compare a tree's logits with those where a sibling and all inert nodes hold a token whose embedding is NaN."""
    tree, kept, spoilt_token = [-1, 0, 0, 1], [0, 1, 3], 0
    parents = torch.tensor([tree + [-2] * (NODES - len(tree))] * 3)
    tokens = torch.randint(1, VOCABULARY, (3, NODES))
    tokens[:, [t for t in range(NODES) if t not in kept]] = spoilt_token
    clean = verified.verify(parents, tokens)[:, kept, 1:]
    with torch.no_grad():
        verified.model.get_input_embeddings().weight[spoilt_token] = torch.nan
    spoilt = verified.verify(parents, tokens)[:, kept, 1:]
    # The model's own experts multiply all tokens of an expert together, and one token more rounds the others differently.
    has_experts = any(getattr(verified.model.config, name, None) for name in ("num_experts", "num_local_experts"))
    torch.testing.assert_close(spoilt, clean, rtol=0, atol=1e-5 if has_experts else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_nodes_as_heads_in_a_batch_of_one_are_proven(family: str) -> None:
    """Then a weight a head, [1, 1, H, 1], has the shape of a number a token."""
    config = tiny_model(family).config
    names = ("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "num_heads")
    heads = next(getattr(config, name) for name in names if getattr(config, name, None))
    torch._dynamo.reset()
    model = tiny_model(family)
    cache = treewy.TreeCache(model.config, 1, 32, heads)
    cache.set_tree(treewy.DraftTree.from_widths((1,)))
    step = torch.compile(model, backend=backend, fullgraph=True, options={"treewy.codegen": False})
    with records.collect() as found, torch.no_grad():
        step(**cache.inputs(torch.zeros(1, 2, dtype=torch.int64)))
    assert len(found) == 2 * cache.linear_layers
    assert all(isinstance(record, records.Proven) for record in found)
