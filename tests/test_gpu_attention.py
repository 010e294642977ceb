"""The attention kernel on a GPU against the reference in float64, eager and compiled.

Bounds: an output is rounded to the model's type, 2^-9 for bfloat16 and 2^-12 for float16, and the weights are rounded to it
once before they meet the values; float32 goes through tf32x3, a few ulp.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.kernel_cases import relative_error
from tests.trees import BRANCHES, FOREST, INERT_BETWEEN, ROOT_ALONE, batch_of, random_parents
from treewy_inductor import ops_attention, reference_attention
from treewy_inductor.encoding import derive
from treewy_inductor.lowerings import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_filled_empty")]
BOUND = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 2e-6}
MIXED = batch_of(BRANCHES, FOREST, INERT_BETWEEN, ROOT_ALONE)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    on_gpu.register_once()


def arguments(
    parents: Tensor,
    lengths: list[int],
    L: int,
    dims: tuple[int, int] = (256, 256),
    heads: tuple[int, int] = (2, 4),
    dtype: torch.dtype = torch.bfloat16,
) -> list:
    """Return the op's arguments on the GPU, NaN where nothing may be read."""
    torch.manual_seed(0)
    (B, N), (HK, groups), (D, E) = parents.shape, heads, dims
    query = torch.randn(B, N, HK * groups, D, device="cuda", dtype=dtype)
    keys, values = (torch.randn(B, HK, L, dim, device="cuda", dtype=dtype) for dim in (D, E))
    query[parents.cuda() == -2] = torch.nan
    for row, length in enumerate(lengths):
        inert = length + (parents[row] == -2).nonzero()[:, 0]
        for rows in (keys, values):
            rows[row, :, length + N :] = rows[row, :, inert] = torch.nan
    tree = derive(parents.cuda(), 4)[0], torch.tensor(lengths, device="cuda")
    return [query.transpose(1, 2), keys, values, *tree, D**-0.5]


def check(case: list) -> None:
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in case]
    exact, found = reference_attention.tree_attention(*wide), ops_attention.tree_attention(*case)
    error = relative_error(found, exact)
    assert error <= BOUND[case[0].dtype], f"relative error {error:.1e} at {tuple(case[0].shape)}, {case[0].dtype}"
    is_node = (case[3] != 0).any(-1)
    assert (found[~is_node] == 0).all() and found.isfinite().all()


@pytest.mark.parametrize("lengths", [[0, 1, 63, 64], [65, 500, 1000, 2000], [2039, 128, 0, 1]], ids=str)
@pytest.mark.parametrize("L", [2048, 32768])
def test_any_length(lengths: list[int], L: int) -> None:
    check(arguments(MIXED, lengths, L))


@pytest.mark.parametrize("nodes", [2, 16, 40, 64, 65, 130, 256])
@pytest.mark.parametrize("batch", [2, 24])
def test_any_number_of_nodes(nodes: int, batch: int) -> None:
    parents = batch_of(*[random_parents(nodes, nodes + i, inert=0.1 * (i % 3)) for i in range(batch)])
    check(arguments(parents, [37 * i for i in range(batch)], 37 * batch + nodes))


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (96, 192), (40, 24)], ids=str)
def test_any_head_dims_and_types(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    check(arguments(MIXED, [0, 70, 300, 5], 400, dims, dtype=dtype))


@pytest.mark.parametrize("heads", [(1, 1), (2, 3), (1, 16), (4, 1)], ids=str)
def test_any_number_of_query_heads_a_key_head(heads: tuple[int, int]) -> None:
    check(arguments(MIXED, [0, 70, 300, 5], 400, heads=heads))


@pytest.mark.parametrize("L", [256, 32768])
@pytest.mark.parametrize("held", [1e30, torch.inf, torch.nan])
def test_a_rejected_leaf_changes_no_bit_of_the_others(L: int, held: float) -> None:
    parents = batch_of(BRANCHES)
    leaf = max(t for t in range(parents.shape[1]) if t not in BRANCHES)
    case = arguments(parents, [100], L)
    clean = ops_attention.tree_attention(*case)
    for x in (case[1], case[2]):
        x[0, :, 100 + leaf] = held
    case[0][0, :, leaf] = held
    keep = torch.arange(parents.shape[1]) != leaf
    assert torch.equal(ops_attention.tree_attention(*case)[:, keep], clean[:, keep])


def test_compiled_op_writes_the_cache_in_place_and_runs_the_same_kernel() -> None:
    case = arguments(MIXED, [0, 70, 300, 5], 400)
    new = torch.randn(4, 2, MIXED.shape[1], 256, device="cuda", dtype=torch.bfloat16)
    row, at = torch.arange(4, device="cuda")[:, None], case[4][:, None] + torch.arange(MIXED.shape[1], device="cuda")

    def layer(query: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor, lengths: Tensor) -> Tensor:
        keys[row, :, at] = new.transpose(1, 2)
        values[row, :, at] = new.transpose(1, 2)
        return ops_attention.tree_attention(query, keys, values, ancestors, lengths, case[5]) + 1

    expected = layer(case[0], case[1].clone(), case[2].clone(), *case[3:5])
    found = torch.compile(layer, fullgraph=True)(*case[:5])
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
