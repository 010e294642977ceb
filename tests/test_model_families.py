"""Every other family, unmodified and compiled: a tree's logits and what is committed equal the plain model over each path."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_models import FAMILIES, VOCABULARY, tiny_model
from tests.trees import random_parents
from tests.verified_model import TOLERANCE, VerifiedModel
from treewy_inductor import records

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
