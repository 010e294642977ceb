"""Whatever configuration a verification or commit may have is one that the tuner checks, at that very shape."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.checked_shapes import Check, all_checks, fused_checks
from bench.kernel_cases import Shape, tree_parents
from bench.kernels import RESULTS
from bench.planned_fused import SLOTS
from bench.planned_verify import ran_as
from bench.tune_kernels import describe
from tests.described_launches import commit_state_launches, configuration, fused_launches, verify_launches
from treewy_inductor.lowerings.configurations import AT_ONCE

DIMS = ((128, 128), (96, 192), (64, 64), (256, 256))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NODES = range(1, 257)
# What tells rows of bench/results/kernels_tune.json apart.
NAMES = ("kernel", "tree", "batch", "groups", "K", "V", "dtype", "state_dtype", "trunk")
# Around what decides a tile, and of each kind that the compiler knows: 1, a multiple of 16, or neither.
ROWS = (1, 2, 3, 8, 9, 16, 32, 33, 34, 48, 64, 100, 128, 1000)


def kinds() -> Iterator[tuple[Shape, int]]:
    """Yield shapes, each with the slots of a trunk."""
    for (K, V), dtype in itertools.product(DIMS, DTYPES):
        yield Shape(K=K, V=V, dtype=dtype), 0
    yield Shape(state_dtype=torch.bfloat16), 0
    yield Shape(), 16


@functools.cache
def configurations(nodes: int, shape: Shape, slots: int, batch: int) -> frozenset[tuple]:
    launches = verify_launches(nodes, shape, slots, batch) + commit_state_launches(nodes, shape, 1, batch)
    return frozenset(map(configuration, launches))


def test_the_tuner_checks_every_configuration_that_a_tree_can_meet() -> None:
    checked = set().union(*(configurations(len(tree_parents(tree)), *kind) for tree, *kind in all_checks()))
    for kind in kinds():
        for nodes in NODES:
            # Past 64 nodes no tile depends on the number of states.
            for batch in ROWS if nodes <= 64 else (1, 8, 16):
                for met in configurations(nodes, *kind, batch):
                    assert met in checked, f"{nodes} nodes, {batch} rows, {kind}: {met}"


def test_the_tuner_checks_every_configuration_of_a_fused_commit() -> None:
    def fused(nodes: int, shape: Shape, batch: int) -> tuple:
        """Return the configuration of the one kernel, or of the fold before a verification like any other."""
        return configuration(fused_launches(nodes, shape, SLOTS, batch)[0])

    checked = {fused(len(tree_parents(check.tree)), check.shape, check.batch) for check in fused_checks()}
    for (shape, slots), nodes, batch in itertools.product(kinds(), (*range(1, 20), 40, 64, 100, 256), ROWS):
        if not slots:
            assert fused(nodes, shape, batch) in checked, f"{nodes} nodes, {batch} rows, {shape}"


def test_the_tuner_checks_few_and_many_internal_nodes_of_every_size() -> None:
    # Which way the kernel goes at up to 64 nodes is read from the tree, so one configuration is two, whatever kind of number B is.
    def of_any_rows(nodes: int, shape: Shape, slots: int, batch: int) -> frozenset[tuple]:
        launches = map(configuration, verify_launches(nodes, shape, slots, batch))
        return frozenset((options, tuple(kind for kind in kinds if kind[0] != "B")) for options, kinds in launches)

    for kind in kinds():
        checks = [check for check in all_checks() if (check.shape, check.slots) == kind]
        for is_many in (False, True):
            alike = [check for check in checks if (len(set(tree_parents(check.tree)) - {-1}) > 16) == is_many]
            seen = frozenset().union(*(of_any_rows(len(tree_parents(check.tree)), *kind, check.batch) for check in alike))
            for nodes, batch in itertools.product(range(17 + is_many, 65), ROWS):
                met = of_any_rows(nodes, *kind, batch)
                assert met <= seen, f"{nodes} nodes, {batch} rows, {kind}, {'many' if is_many else 'few'} internal"


def test_the_tuner_checks_from_one_to_four_value_heads_a_key_head_in_few_rows_and_many() -> None:
    for groups in (1, 2, 3, 4):
        states = {check.batch * check.shape.HV for check in all_checks() if check.shape.groups == groups}
        assert min(states) < 100 and max(states) > 2 * AT_ONCE


def test_the_measured_checks_are_those_of_the_list_and_of_the_tiles_of_today() -> None:
    rows = json.loads((RESULTS / "kernels_tune.json").read_text())["rows"]
    measured = {tuple(row[name] for name in NAMES): row for row in rows if "trunk" in row}

    def right_row(kernel: str, check: Check, slots: int) -> dict[str, Any]:
        case = {"kernel": kernel, **describe(check.tree, check.batch, check.shape), "trunk": slots}
        row = measured[tuple(case[name] for name in NAMES)]
        assert row["is_right"], row
        return row

    for check in all_checks():
        row, shape = right_row("verify", check, check.slots), check.shape
        assert row["ran_as"] == ran_as(verify_launches(row["nodes"], shape, check.slots, check.batch)), row
        assert row["commit_ran_as"] == ran_as(commit_state_launches(row["nodes"], shape, 1, check.batch)), row
    for check in fused_checks():
        row = right_row("fused", check, SLOTS)
        assert row["ran_as"] == ran_as(fused_launches(row["nodes"], check.shape, SLOTS, check.batch)), row
