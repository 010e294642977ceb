"""Whatever tile the table may give is one that the tuner checks at that shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from bench.kernel_cases import Shape, tree_parents
from bench.tune_kernels import all_checks
from tests.described_launches import configuration, verify_launches

DIMS = ((128, 128), (96, 192), (64, 64), (256, 256))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NODES = range(1, 257)


def kinds() -> Iterator[tuple[Shape, int]]:
    """Yield shapes, each with the slots of a trunk."""
    for (K, V), dtype in itertools.product(DIMS, DTYPES):
        yield Shape(K=K, V=V, dtype=dtype), 0
    yield Shape(state_dtype=torch.bfloat16), 0
    yield Shape(), 16


def configurations(nodes: int, shape: Shape, slots: int) -> set[tuple]:
    return {configuration(launch) for launch in verify_launches(nodes, shape, slots)}


def test_the_tuner_checks_every_configuration_that_a_tree_can_meet() -> None:
    checked = set().union(*(configurations(len(tree_parents(tree)), *kind) for tree, *kind in all_checks()))
    for kind in kinds():
        for nodes in NODES:
            for met in configurations(nodes, *kind):
                assert met in checked, f"{nodes} nodes, {kind}: {met}"


def test_the_tuner_checks_few_and_many_internal_nodes_of_every_size() -> None:
    # Which way the kernel goes at up to 64 nodes is read from the tree, so one configuration is two.
    for kind in kinds():
        trees = [tree_parents(tree) for tree, *checked in all_checks() if tuple(checked) == kind]
        for is_many in (False, True):
            sizes = [len(parents) for parents in trees if (len(set(parents) - {-1}) > 16) == is_many]
            seen = set().union(*(configurations(nodes, *kind) for nodes in sizes))
            for nodes in range(17 + is_many, 65):
                assert configurations(nodes, *kind) <= seen, f"{nodes} nodes, {kind}, {'many' if is_many else 'few'} internal"


def test_the_tuner_checks_from_one_to_four_value_heads_a_key_head() -> None:
    assert {1, 2, 3, 4} <= {check.shape.groups for check in all_checks()}
