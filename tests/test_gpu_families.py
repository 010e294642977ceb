"""Every family, unmodified and compiled by Inductor for a GPU: a tree's logits equal the plain model over each path."""

from __future__ import annotations

import pytest

from bench import families
from tests.tiny_models import FAMILIES


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_verifies_on_the_gpu_in_one_graph_with_every_layer_proven(family: str) -> None:
    row = families.measure(family, codegen=True, device="cuda")
    if "refused" in row and "has no" in row["refused"]:
        pytest.skip(row["refused"])
    assert families.is_good(row), row
