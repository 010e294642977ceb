"""The kernels on a GPU against the reference in float64: every shape, input type and kind of tree that the ops allow.

Tolerances: float32 results of exact products carry a few ulp and the split's 2^-17 a factor, far under 1e-6 in norm; an
output is rounded once more to the model's type, 2^-9 for bfloat16 and 2^-12 for float16. float32 inputs go through tf32x3.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.kernel_cases import Shape, arguments, float64_results, relative_error
from tests.trees import BRANCHES, FOREST, INERT_BETWEEN, ROOT_ALONE, batch_of, random_parents
from treewy_inductor import ops, reference
from treewy_inductor.lowerings import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_filled_empty")]
OUTPUT_BOUND = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    on_gpu.register_once()


def check(parents: Tensor, shape: Shape, seed: int = 0) -> None:
    case = arguments(parents, parents.shape[0], shape, seed)
    results = ops.tree_gated_delta(*case)
    bounds = (OUTPUT_BOUND[shape.dtype], 2e-6, 1e-6, 1e-6)
    for name, result, exact, bound in zip(("output", "u", "g", "scale"), results, float64_results(case), bounds, strict=True):
        error = relative_error(result, exact)
        assert error <= bound, f"{name}: relative error {error:.1e} over {bound:.0e} for {tuple(parents.shape)} nodes, {shape}"


MIXED = batch_of(BRANCHES, FOREST, INERT_BETWEEN, ROOT_ALONE)


@pytest.mark.parametrize("nodes", [1, 2, 5, 15, 16, 17, 33, 40, 64, 65, 129, 256])
def test_any_number_of_nodes(nodes: int) -> None:
    trees = [random_parents(nodes, 2 * nodes + i, inert=0.1 * i) for i in range(3)]
    check(batch_of(*trees), Shape(HK=4))


@pytest.mark.parametrize("nodes", [40, 256])
def test_deep_chain(nodes: int) -> None:
    check(batch_of([*range(-1, nodes - 1)]), Shape(HK=4))


@pytest.mark.parametrize("dims", [(96, 192), (64, 64), (256, 256), (48, 80)], ids=str)
@pytest.mark.parametrize("nodes", [9, 40, 130])
def test_any_head_dims(dims: tuple[int, int], nodes: int) -> None:
    parents = MIXED if nodes == 9 else batch_of(random_parents(nodes, 1), random_parents(nodes, 2, inert=0.2))
    check(parents, Shape(HK=2, K=dims[0], V=dims[1]))


@pytest.mark.parametrize("groups", [1, 3, 4])
def test_any_number_of_value_heads_a_key_head(groups: int) -> None:
    check(MIXED, Shape(HK=2, groups=groups))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_trees_in_many_rows(groups: int, state_dtype: torch.dtype) -> None:
    # More than run at once, so that a program takes two value heads where a key head has them.
    trees = [random_parents(1 + row % 16, row, inert=0.1 * (row % 3)) for row in range(48)]
    check(batch_of(*trees), Shape(HK=32 // groups, groups=groups, state_dtype=state_dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("nodes", [9, 40, 130])
def test_other_input_types(dtype: torch.dtype, nodes: int) -> None:
    parents = MIXED if nodes == 9 else batch_of(random_parents(nodes, 1), random_parents(nodes, 2, inert=0.2))
    check(parents, Shape(HK=2, dtype=dtype))


@pytest.mark.parametrize("nodes", [9, 40])
def test_state_in_bfloat16(nodes: int) -> None:
    check(MIXED if nodes == 9 else batch_of(random_parents(nodes, 1)), Shape(HK=2, state_dtype=torch.bfloat16))


def test_more_programs_than_a_grid_dimension_of_65535() -> None:
    check(batch_of(*[BRANCHES[:4], FOREST[:4]] * 1100), Shape(HK=32, groups=1, K=16, V=16))


def test_state_stored_with_values_innermost() -> None:
    case = list(arguments(MIXED, 4, Shape(HK=2)))
    expected = ops.tree_gated_delta(*case)
    case[5] = case[5].contiguous()
    for a, b in zip(ops.tree_gated_delta(*case), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [4, 128])
def test_what_stands_at_an_inert_node_changes_no_bit(rows: int) -> None:
    parents, shape = MIXED.repeat(rows // 4, 1), Shape(HK=2 if rows == 4 else 16)
    case = arguments(parents, rows, shape)
    expected = ops.tree_gated_delta(*case)
    inert = parents.cuda() == -2
    for x in case[:5]:
        x[inert] = 1e30
    assert all(torch.equal(a, b) for a, b in zip(ops.tree_gated_delta(*case), expected, strict=True))


@pytest.mark.parametrize("path_length", [1, 4, 16, 37])
@pytest.mark.parametrize("dims", [(128, 128), (96, 192), (64, 64), (256, 256)], ids=str)
def test_commit_state(dims: tuple[int, int], path_length: int) -> None:
    L, B, N, HK, HV, (K, V) = 3, 3, 40, 2, 4, dims
    state = torch.randn(L, B, HV, V, K, device="cuda").transpose(3, 4)
    keys = torch.randn(L, B, N, HK, K, device="cuda", dtype=torch.bfloat16)
    scale, decay = torch.rand(L, B, N, HK, device="cuda"), -torch.rand(L, B, N, HV, device="cuda")
    values = torch.randn(L, B, N, HV, V, device="cuda")
    path = torch.full((B, N), -1, dtype=torch.int32)
    path[0, :path_length] = torch.randperm(N)[:path_length].sort().values
    path[2, 0] = 0
    for tensor in (keys, scale, values, decay):
        tensor[:, 1] = torch.nan
    exact = state.double()
    reference.commit_state(exact, keys.double(), scale.double(), values.double(), decay.double(), path.cuda())
    untouched = state[:, 1].clone()
    ops.commit_state(state, keys, scale, values, decay, path.cuda())
    assert relative_error(state, exact) < 5e-6
    assert torch.equal(state[:, 1], untouched)


def test_commit_convolution_and_attention_caches() -> None:
    L, B, N = 3, 4, 40
    path = torch.full((B, N), -1, dtype=torch.int32, device="cuda")
    for row, nodes in enumerate(([0], [0, 2, 5, 39], [], [*range(20)])):
        path[row, : len(nodes)] = torch.tensor(nodes, device="cuda")
    history = torch.randn(L, B, 999, 4, device="cuda", dtype=torch.bfloat16)
    inputs = torch.randn(L, B, N, 999, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    keys = torch.randn(L, B, 2, 300, 256, device="cuda", dtype=torch.bfloat16)
    values = torch.randn(L, B, 2, 300, 96, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([0, 100, 7, 260], device="cuda")
    expected = [x.clone() for x in (history, keys, values)]
    reference.commit_conv(expected[0], inputs, path)
    reference.commit_keys_values(expected[1], expected[2], lengths, path)
    ops.commit_conv(history, inputs, path)
    ops.commit_keys_values(keys, values, lengths, path)
    assert torch.equal(history, expected[0])
    assert torch.equal(keys, expected[1])
    assert torch.equal(values, expected[2])


@pytest.mark.parametrize("rows", [4, 128])
def test_compiled_op_runs_the_same_kernels(rows: int) -> None:
    case = arguments(MIXED.repeat(rows // 4, 1), rows, Shape(HK=2 if rows == 4 else 16))

    def layer(*args: Tensor) -> tuple[Tensor, ...]:
        output, *rest = ops.tree_gated_delta(args[0] + 0, *args[1:4], args[4].sigmoid(), *args[5:], *case[10:])
        return (torch.relu(output), *rest)

    expected = layer(*case[:10])
    compiled = torch.compile(layer, fullgraph=True)(*case[:10])
    # Sizes that are symbols, from the second number of rows on, are other machine code: sums differ in their last bits, and an
    # output between two bfloat16 numbers may become the other one.
    torch.testing.assert_close(compiled[0], expected[0], rtol=torch.finfo(expected[0].dtype).eps, atol=1e-5)
    for a, b in zip(compiled[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
