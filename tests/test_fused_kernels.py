"""The kernels of a fused commit against the reference, in Triton's interpreter: float32, since it multiplies bfloat16 wrongly."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.interpreted_checks import outcomes_of
from tests.test_policy_kernels import HV, NORM_EPS, SCALE, B, K, V, inputs, links, trunk
from tests.trees import CHAIN, batch_of, random_parents
from treewy_inductor import reference_fused
from treewy_inductor.encoding import derive
from treewy_inductor.lowerings.configurations import FusedTile
from treewy_inductor.lowerings.register_tile_kernel import as_matrix, as_memory, cells_of_tile, keys_of_matrix

TILE = FusedTile(64, 4)


@triton.jit
def through_registers_kernel(state, x, back, products, KEYS: tl.constexpr, PER: tl.constexpr):
    """Copy ``[64, KEYS]`` of ``state`` to ``back`` by way of the matrix unit's order, and store products with rows of ``x``."""
    cells = cells_of_tile(1, KEYS, 64, KEYS, PER)
    matrix = as_matrix(tl.load(state + cells), 64, KEYS, PER)
    tl.store(back + cells, as_memory(matrix, 64, KEYS, PER))
    rows = tl.load(x + tl.arange(0, 16)[:, None] * KEYS + tl.arange(0, KEYS)[None, :])
    found = tl.sum(matrix[:, None, :] * keys_of_matrix(rows, KEYS, PER)[None, :, :], 2)
    tl.store(products + tl.arange(0, 64)[:, None] * 16 + tl.arange(0, 16)[None, :], found)


def check(parents: Tensor, slots: int, lengths: list[int], tile: FusedTile | None, state_dtype: torch.dtype) -> None:
    """Compare results and state with the reference, whichever of its two dimensions the state is laid out along."""
    from treewy_inductor.lowerings.launch import EAGER
    from treewy_inductor.lowerings.tree_gated_delta_fused import launch_tree_gated_delta_fused

    generator = torch.Generator().manual_seed(slots)
    case = inputs(generator, parents)
    ancestors, _, _, order, internal, height = derive(parents, 4)
    *tensors, length = trunk(generator, slots, lengths)
    rest = ancestors, order, internal, height, *(tensor[0] for tensor in tensors), length, SCALE, NORM_EPS, torch.float32
    for dims in ((2, 3), (3, 3)):
        state = torch.randn(B, HV, V, K, generator=generator).to(state_dtype).transpose(2, 3)
        state = state if dims == (2, 3) else state.contiguous()
        expected_state = state.clone()
        expected = reference_fused.tree_gated_delta_fused(*case, expected_state, *rest)
        found = launch_tree_gated_delta_fused(EAGER, *case, state, *rest, tile=tile)
        # Half a unit in the last place of a bfloat16 may fall to either side.
        bound = 1e-5 if state_dtype == torch.float32 else 8e-3
        torch.testing.assert_close(state, expected_state, rtol=bound, atol=bound / 10)
        for result, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(result.handle, exact, rtol=10 * bound, atol=2 * bound)


def check_one_kernel() -> None:
    for slots, lengths in ((5, [0, 3, 5]), (16, [16, 1, 0])):
        for state_dtype in (torch.float32, torch.bfloat16):
            check(links(), slots, lengths, TILE, state_dtype)


def check_several_parts_a_program() -> None:
    check(links(), 5, [5, 0, 2], FusedTile(16, 4, parts=2), torch.float32)


def check_a_fold_before() -> None:
    # Another dtype's tile, a longer trunk, a larger tree: each takes two launches.
    check(links(), 5, [0, 3, 5], None, torch.float32)
    check(links(), 19, [17, 0, 19], TILE, torch.float32)
    check(batch_of([*range(-1, 18)], random_parents(19, 2), CHAIN), 19, [4, 19, 0], TILE, torch.float32)


def check_what_an_empty_trunk_holds_is_not_read() -> None:
    from treewy_inductor.lowerings.launch import EAGER
    from treewy_inductor.lowerings.tree_gated_delta_fused import launch_tree_gated_delta_fused

    generator, parents = torch.Generator().manual_seed(3), links()
    case = inputs(generator, parents)
    ancestors, _, _, order, internal, height = derive(parents, 4)
    *tensors, length = trunk(generator, 5, [0, 0, 0])
    state = torch.randn(B, HV, V, K, generator=generator).transpose(2, 3)
    before = state.clone()
    rest = ancestors, order, internal, height, *(tensor[0] for tensor in tensors), length, SCALE, NORM_EPS, torch.float32
    for tile in (TILE, None):
        for _ in range(2):
            launch_tree_gated_delta_fused(EAGER, *case, state, *rest, tile=tile)
        assert torch.equal(state, before)


def check_a_tile_in_registers_is_the_tile_in_memory() -> None:
    """Through the matrix unit's order and back every element, and a product over keys in that order is the product."""
    for keys, per in ((64, 4), (32, 4), (64, 8), (8, 2)):
        state, x = torch.randn(64, keys), torch.randn(16, keys)
        back, products = torch.empty(64, keys), torch.empty(64, 16)
        through_registers_kernel[(1,)](state, x, back, products, keys, per)
        assert torch.equal(back, state)
        torch.testing.assert_close(products, state @ x.T)


CHECKS = (
    check_a_tile_in_registers_is_the_tile_in_memory,
    check_one_kernel,
    check_several_parts_a_program,
    check_a_fold_before,
    check_what_an_empty_trunk_holds_is_not_read,
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of("tests.test_fused_kernels")


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_kernel_equals_reference(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == ""
