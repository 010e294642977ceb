"""A commit fused with the next verification: the same states and results as one after the other, whatever is accepted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.test_ops_replay import (
    CHAIN,
    FORK,
    HV,
    NORM_EPS,
    SCALE,
    STAR,
    B,
    K,
    N,
    V,
    empty_trunk,
    encode,
    node_inputs,
    random_path,
    tree_arguments,
)
from treewy_inductor import ops, ops_fused, ops_replay, reference
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.reference_replay import trunk_path

TREES = (CHAIN, STAR, FORK)


def fused(inputs: list[Tensor], state: Tensor, encoding: TreeEncoding, trunk: list[Tensor]) -> tuple[Tensor, ...]:
    """Fold what was accepted and verify one layer, then empty the trunk."""
    *tensors, length = trunk
    results: tuple[Tensor, ...] = ops_fused.tree_gated_delta_fused(
        *inputs, state[0], *tree_arguments(encoding), *(x[0] for x in tensors), length, SCALE, NORM_EPS, inputs[0].dtype
    )
    length.zero_()
    return results


def commit(state: Tensor, trunk: list[Tensor], key: Tensor, results: tuple[Tensor, ...], path: Tensor) -> None:
    _, u, g, r = results
    ops_replay.commit_trunk(state, *trunk, key[None], r[None], u[None], g[None], path)


def random_paths(generator: torch.Generator) -> Tensor:
    return torch.tensor([random_path(tree.parents, generator) for tree in TREES], dtype=torch.int32)


@pytest.mark.parametrize("per_channel", [False, True])
def test_every_step_equals_the_literal_recurrence(per_channel: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    true_state = torch.randn(B, HV, K, V, generator=generator, dtype=torch.float64)
    state, trunk = true_state.clone()[None], empty_trunk(torch.float64, N, per_channel=per_channel)
    encoding = encode(*TREES)
    accepted_nothing = False
    for _ in range(12):
        inputs = node_inputs(generator, torch.float64, per_channel=per_channel)
        results = fused(inputs, state, encoding, trunk)
        torch.testing.assert_close(state[0], true_state, rtol=0, atol=1e-12)
        expected, states = reference.literal_gated_delta(*inputs, true_state, encoding.parents, SCALE, NORM_EPS)
        torch.testing.assert_close(results[0], expected, rtol=0, atol=1e-12)
        path = random_paths(generator)
        commit(state, trunk, inputs[1], results, path)
        assert torch.equal(trunk[-1], (path >= 0).sum(1).int())
        for row, nodes in enumerate(path.tolist()):
            accepted = [node for node in nodes if node >= 0]
            accepted_nothing |= not accepted
            if accepted:
                true_state[row] = states[row, accepted[-1]]
    assert accepted_nothing


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_results_are_bit_for_bit_those_of_a_commit_and_a_verification(state_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(1, B, HV, K, V, generator=generator).to(state_dtype)
    plain, trunk, encoding = state.clone(), empty_trunk(torch.float32, N), encode(*TREES)
    for _ in range(5):
        inputs = node_inputs(generator, torch.float32)
        results = fused(inputs, state, encoding, trunk)
        expected = ops.tree_gated_delta(*inputs, plain[0], *tree_arguments(encoding), SCALE, NORM_EPS, torch.float32)
        for one, other in zip((*results, state), (*expected, plain), strict=True):
            assert torch.equal(one, other)
        path = random_paths(generator)
        commit(state, trunk, inputs[1], results, path)
        _, u, g, r = expected
        ops.commit_state(plain, inputs[1][None], r[None], u[None], g[None], path)


def test_a_tree_that_is_verified_twice_is_preceded_by_what_was_accepted_once() -> None:
    generator = torch.Generator().manual_seed(2)
    state, trunk, encoding = torch.zeros(1, B, HV, K, V), empty_trunk(torch.float32, N), encode(*TREES)
    inputs = node_inputs(generator, torch.float32)
    path = torch.tensor([[0, 1, 2, -1, -1], [0, 3, -1, -1, -1], [-1] * N], dtype=torch.int32)
    commit(state, trunk, inputs[1], fused(inputs, state, encoding, trunk), path)
    first = fused(inputs, state, encoding, trunk)
    assert [bool(row.any()) for row in state[0]] == [True, True, False]
    before = state.clone()
    again = fused(inputs, state, encoding, trunk)
    assert torch.equal(state, before)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


def test_slots_beyond_the_path_change_no_bit() -> None:
    generator = torch.Generator().manual_seed(5)
    state = torch.randn(1, B, HV, K, V, generator=generator)
    clean = [torch.randn(x.shape, generator=generator) if x.is_floating_point() else x for x in empty_trunk(torch.float32, N)]
    clean[3] = -clean[3].abs().cumsum(2)
    inputs, encoding, results = node_inputs(generator, torch.float32), encode(*TREES), []
    for fill in (None, torch.nan, 1e30):
        lengths = torch.tensor([0, 2, N], dtype=torch.int32)
        trunk, folded = [*(x.clone() for x in clean[:-1]), lengths.clone()], state.clone()
        if fill is not None:
            for row, length in enumerate(lengths.tolist()):
                for tensor in trunk[:-1]:
                    tensor[:, row, length:] = fill
        results.append((*fused(inputs, folded, encoding, trunk), folded))
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert torch.equal(one, other)


def test_2000_steps_without_a_reset_stay_within_1e_4_of_float64() -> None:
    generator = torch.Generator().manual_seed(11)
    state, trunk = torch.zeros(1, B, HV, K, V), empty_trunk(torch.float32, N)
    exact, rows, encoding = state[0].double(), torch.arange(B), encode(*TREES)
    for _ in range(2000):
        inputs = node_inputs(generator, torch.float32)
        inputs[3] = inputs[3] / 20
        results = fused(inputs, state, encoding, trunk)
        path = random_paths(generator)
        commit(state, trunk, inputs[1], results, path)
        # The literal recurrence with every node's state, of which the accepted one goes on, in float64.
        wide = [x.double() for x in inputs]
        _, states = reference.literal_gated_delta(*wide, exact, encoding.parents, SCALE, NORM_EPS)
        count = (path >= 0).sum(1)
        last = path.gather(1, (count - 1).clamp(min=0)[:, None]).clamp(min=0)[:, 0].long()
        exact = torch.where((count > 0)[:, None, None, None], states[rows, last], exact)
    ops.commit_state(state, *trunk[:-1], trunk_path(trunk[-1], N))
    assert (state[0] - exact).norm() / exact.norm() < 1e-4


def test_opcheck() -> None:
    generator = torch.Generator().manual_seed(2)
    *tensors, length = [torch.ones_like(x) for x in empty_trunk(torch.float32, N)]
    inputs, state = node_inputs(generator, torch.float32), torch.randn(B, HV, K, V, generator=generator)
    tree = tree_arguments(encode(*TREES))
    arguments = (*inputs, state, *tree, *(x[0] for x in tensors), length, SCALE, NORM_EPS, torch.float32)
    torch.library.opcheck(ops_fused.tree_gated_delta_fused, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_trunk_of_another_shape_is_refused() -> None:
    inputs, encoding = node_inputs(torch.Generator().manual_seed(2), torch.float32), encode(*TREES)
    state, trunk = torch.zeros(1, B, HV, K, V), empty_trunk(torch.float32, N)
    trunk[0] = trunk[0][..., :-1]
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(RuntimeError, match="tree_gated_delta_fused: trunk_keys is"),
    ):
        fused(inputs, state, encoding, trunk)


def test_the_marker_raises_at_run_time() -> None:
    state = torch.zeros(B, HV, K, V)
    with pytest.raises(RuntimeError, match="state_out_fused reached run time"):
        ops_fused.state_out_fused(state, state, state, state, state, state, 0, 0)
