"""The attention kernel against the reference, in Triton's interpreter: float32, as it multiplies bfloat16 wrongly.

The interpreter is chosen when a kernel is defined, so the comparisons run in a process of their own. Bound: products in
float32 carry a few ulp a term, 1e-6 in norm at these sizes, and the reference they meet computes in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.interpreted_checks import outcomes_of
from tests.trees import BRANCHES, FOREST, INERT_BETWEEN, ROOT_ALONE, batch_of, random_parents
from treewy_inductor import reference_attention
from treewy_inductor.encoding import derive

SCALE = 0.2


def arguments(parents: Tensor, lengths: list[int], HK: int, groups: int, D: int, E: int, L: int, seed: int = 0) -> list[Tensor]:
    """Return the tensors of the op in float32; NaN where nothing may be read: inert queries, positions beyond the tree."""
    torch.manual_seed(seed)
    B, N = parents.shape
    # As models lay them out: heads innermost but one.
    query = torch.randn(B, N, HK * groups, D).transpose(1, 2)
    keys, values = torch.randn(B, HK, L, D), torch.randn(B, HK, L, E)
    query.transpose(1, 2)[parents == -2] = torch.nan
    for row, length in enumerate(lengths):
        inert = length + (parents[row] == -2).nonzero()[:, 0]
        for rows in (keys, values):
            rows[row, :, inert] = torch.nan
            rows[row, :, length + N :] = torch.nan
    return [query, keys, values, derive(parents, 4)[0], torch.tensor(lengths)]


def launched(case: list[Tensor], **tile: int) -> Tensor:
    from treewy_inductor.lowerings.attention_tiles import attention_tile
    from treewy_inductor.lowerings.launch import EAGER
    from treewy_inductor.lowerings.tree_attention import launch_tree_attention

    query, keys = case[:2]
    chosen = attention_tile(query.shape[2] * query.shape[1] // keys.shape[1], 999, 1, keys.shape[3], 4)
    return launch_tree_attention(EAGER, *case, SCALE, tile=chosen._replace(**tile)).handle


def check(
    parents: Tensor, lengths: list[int], HK: int = 2, groups: int = 2, D: int = 16, E: int = 16, L: int = 90, **tile: int
) -> None:
    case = arguments(parents, lengths, HK, groups, D, E, L)
    found = launched(case, **tile)
    wide = [x.double() if x.is_floating_point() else x for x in case]
    exact = reference_attention.tree_attention(*wide, SCALE)
    error = float((found.double() - exact).norm() / exact.norm())
    assert error < 1e-6, f"{error:.1e} for {tuple(parents.shape)} nodes after {lengths}, {tile}"
    assert (found[parents == -2] == 0).all()


MIXED = batch_of(BRANCHES, FOREST, INERT_BETWEEN, ROOT_ALONE)


def check_any_length() -> None:
    for lengths in ([0, 1, 16, 17], [31, 32, 33, 80], [81, 64, 63, 5]):
        check(MIXED, lengths)


def check_any_number_of_parts() -> None:
    # More parts than blocks: some are empty.
    for splits in (2, 3, 7, 12):
        check(MIXED, [0, 3, 40, 81], splits=splits)


def check_many_nodes() -> None:
    for nodes, splits in ((33, 1), (64, 3), (65, 2), (130, 3)):
        parents = batch_of(random_parents(nodes, nodes), random_parents(nodes, nodes + 1, inert=0.3))
        check(parents, [0, 40], HK=1, groups=1, L=40 + nodes, splits=splits, block_m=64, block_l=64)


def check_dims_and_heads() -> None:
    for D, E, groups in ((24, 40, 1), (64, 64, 3), (128, 128, 4), (16, 256, 8)):
        check(MIXED, [7, 0, 70, 33], D=D, E=E, groups=groups, HK=1)


def check_a_row_without_nodes() -> None:
    check(batch_of([-2, -2], [-1, 0]), [9, 0], splits=2)
    check(batch_of([-2, -2], [-1, 0]), [0, 9])


def check_values_of_rejected_nodes() -> None:
    parents = batch_of(BRANCHES, FOREST)
    leaf = [next(t for t in range(len(tree) - 1, 0, -1) if t not in tree) for tree in (BRANCHES, FOREST)]
    results = []
    for held in (0.5, 1e30, torch.inf, torch.nan):
        case = arguments(parents, [21, 0], 2, 2, 16, 16, 40)
        for row, length in enumerate((21, 0)):
            case[1][row, :, length + leaf[row]] = case[2][row, :, length + leaf[row]] = held
        for splits in (1, 3):
            results.append(launched(case, splits=splits))
            for row in range(2):
                results[-1][row, leaf[row]] = 0
    for again in results[2:]:
        assert any(torch.equal(again, first) for first in results[:2])
    assert float((results[0] - results[1]).abs().max()) < 1e-6


def check_strided_inputs() -> None:
    case = arguments(MIXED, [4, 9, 30, 2], 2, 2, 16, 16, 60)
    expected = launched(case)
    # A packed tree as TreeCache hands it, caches with positions outermost, and a query whose last dimension is not contiguous.
    packed = torch.cat([case[3], case[4][:, None, None].expand(-1, case[3].shape[1], -1)], -1)
    case[3], case[4] = packed[..., :-1], packed[:, 0, -1]
    case[1], case[2] = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in case[1:3])
    case[0] = case[0].transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(launched(case), expected)


CHECKS = (
    check_any_length,
    check_any_number_of_parts,
    check_many_nodes,
    check_dims_and_heads,
    check_a_row_without_nodes,
    check_values_of_rejected_nodes,
    check_strided_inputs,
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of(__name__)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_kernel_equals_reference(check: str, outcomes: dict[str, str]) -> None:
    assert outcomes[check] == "", outcomes[check]
