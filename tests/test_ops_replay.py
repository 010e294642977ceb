"""Deferred commit: a tree on a trunk gives what the literal recurrence gives from the true state, however long it is deferred."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from treewy_inductor import ops, ops_replay, reference
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.reference_replay import trunk_path
from treewy_inductor.tree import DraftTree

CHAIN = DraftTree([-1, 0, 1, 2, 3])
STAR = DraftTree([-1, 0, 0, 0, 0])
FORK = DraftTree([-1, 0, 0, 1, 3])
B, N, HK, HV, K, V, T = 3, 5, 2, 4, 6, 5, 7
SCALE, NORM_EPS = K**-0.5, 1e-6


def node_inputs(generator: torch.Generator, dtype: torch.dtype, *, per_channel: bool = False) -> list[Tensor]:
    """Return query, key, value, log_decay and beta of one step, beta up to 2 and decays down to exp(-1)."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    log_decay = -torch.rand(B, N, HV, *([K] if per_channel else []), generator=generator, dtype=dtype)
    beta = 2 * torch.rand(B, N, HV, generator=generator, dtype=dtype)
    return [randn(B, N, HK, K), randn(B, N, HK, K), randn(B, N, HV, V), log_decay, beta]


def empty_trunk(dtype: torch.dtype, slots: int = T, *, per_channel: bool = False, layers: int = 1) -> list[Tensor]:
    """Return a trunk of no tokens whose slots hold NaN, since nothing may read them."""
    work = torch.promote_types(dtype, torch.float32)
    shapes = (HK, K), (HK,), (HV, V), (HV, K) if per_channel else (HV,)
    tensors = [
        torch.full((layers, B, slots, *shape), torch.nan, dtype=dtype if i == 0 else work) for i, shape in enumerate(shapes)
    ]
    return [*tensors, torch.zeros(B, dtype=torch.int32)]


def encode(*trees: DraftTree) -> TreeEncoding:
    return TreeEncoding(len(trees), N).fill(torch.stack([tree.padded(N) for tree in trees]))


def tree_arguments(encoding: TreeEncoding) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return encoding.ancestors, encoding.order, encoding.internal, encoding.height


def verify(inputs: list[Tensor], state: Tensor, encoding: TreeEncoding, trunk: list[Tensor]) -> tuple[Tensor, ...]:
    """Verify one layer's tree on its trunk."""
    *tensors, length = trunk
    return ops_replay.tree_gated_delta_trunk(
        *inputs, state, *tree_arguments(encoding), *(x[0] for x in tensors), length, SCALE, NORM_EPS, inputs[0].dtype
    )


def random_path(parents: list[int], generator: torch.Generator) -> list[int]:
    """Return nodes from the root to a random node, padded with -1 to N; now and then none at all."""
    node = int(torch.randint(-1, len(parents), (), generator=generator))
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path + [-1] * (N - len(path))


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("slots", [1, T])
def test_every_step_equals_the_literal_recurrence(slots: int, per_channel: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    true_state = torch.randn(B, HV, K, V, generator=generator, dtype=torch.float64)
    state, trunk = true_state.clone()[None], empty_trunk(torch.float64, slots, per_channel=per_channel)
    was_deferred = was_folded = False
    for _ in range(12):
        encoding = encode(CHAIN, STAR, FORK)
        inputs = node_inputs(generator, torch.float64, per_channel=per_channel)
        output, u, g, r = verify(inputs, state[0], encoding, trunk)
        expected, states = reference.literal_gated_delta(*inputs, true_state, encoding.parents, SCALE, NORM_EPS)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
        path = torch.tensor([random_path(tree.parents, generator) for tree in (CHAIN, STAR, FORK)], dtype=torch.int32)
        before = state.clone()
        ops_replay.commit_trunk(state, *trunk, inputs[1][None], r[None], u[None], g[None], path)
        was_deferred |= bool((trunk[-1] > 0).any())
        was_folded |= not torch.equal(before, state)
        for row, nodes in enumerate(path.tolist()):
            accepted = max((step for step, node in enumerate(nodes) if node >= 0), default=-1)
            if accepted >= 0:
                true_state[row] = states[row, nodes[accepted]]
    assert was_deferred and was_folded


def test_a_fold_leaves_the_state_that_commit_state_leaves() -> None:
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(1, B, HV, K, V, generator=generator, dtype=torch.float64)
    state, trunk = plain.clone(), empty_trunk(torch.float64)
    for step in range(9):
        encoding = encode(FORK, CHAIN, STAR)
        inputs = node_inputs(generator, torch.float64)
        _, u, g, r = verify(inputs, state[0], encoding, trunk)
        u_plain, g_plain, r_plain = ops.tree_gated_delta(
            *inputs, plain[0], *tree_arguments(encoding), SCALE, NORM_EPS, torch.float64
        )[1:]
        paths = [random_path(tree.parents, generator) for tree in (FORK, CHAIN, STAR)]
        path = torch.tensor(paths, dtype=torch.int32)
        ops_replay.commit_trunk(state, *trunk, inputs[1][None], r[None], u[None], g[None], path)
        ops.commit_state(plain, inputs[1][None], r_plain[None], u_plain[None], g_plain[None], path)
        flushed = state.clone()
        ops.commit_state(flushed, *trunk[:-1], trunk_path(trunk[-1], T))
        torch.testing.assert_close(flushed, plain, rtol=0, atol=1e-13, msg=lambda text, step=step: f"step {step}: {text}")


def test_rows_fill_and_fold_on_their_own() -> None:
    generator = torch.Generator().manual_seed(3)
    state, trunk = torch.zeros(1, B, HV, K, V), empty_trunk(torch.float32)
    inputs = node_inputs(generator, torch.float32)
    _, u, g, r = verify(inputs, state[0], encode(CHAIN, CHAIN, CHAIN), trunk)
    path = torch.tensor([[0, 1, 2, 3, 4], [0, 1, -1, -1, -1], [-1] * 5], dtype=torch.int32)
    ops_replay.commit_trunk(state, *trunk, inputs[1][None], r[None], u[None], g[None], path)
    assert trunk[-1].tolist() == [5, 2, 0]
    assert not state.any()
    ops_replay.commit_trunk(state, *trunk, inputs[1][None], r[None], u[None], g[None], path)
    assert trunk[-1].tolist() == [0, 4, 0]
    assert [bool(row.any()) for row in state[0]] == [True, False, False]


def test_slots_beyond_the_trunk_and_rejected_nodes_change_no_bit() -> None:
    generator = torch.Generator().manual_seed(5)
    state = torch.randn(1, B, HV, K, V, generator=generator)
    clean = [torch.randn(x.shape, generator=generator) if x.is_floating_point() else x for x in empty_trunk(torch.float32)]
    clean[3] = -clean[3].abs().cumsum(2)
    clean[-1] = torch.tensor([0, 2, 6], dtype=torch.int32)
    dirty = [x.clone() for x in clean]
    for row, length in enumerate(clean[-1].tolist()):
        for tensor in dirty[:-1]:
            tensor[:, row, length:] = torch.nan
    inputs, encoding = node_inputs(generator, torch.float32), encode(FORK, FORK, FORK)
    results = [verify(inputs, state[0], encoding, trunk) for trunk in (clean, dirty)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)

    path = torch.tensor([[0, 2, -1, -1, -1]] * B, dtype=torch.int32)
    committed = []
    for trunk, spoil in ((clean, False), (dirty, True)):
        nodes = [x.clone()[None] for x in (inputs[1], results[0][3], results[0][1], results[0][2])]
        if spoil:
            for tensor in nodes:
                tensor[:, :, [1, 3, 4]] = torch.nan
        new_state = state.clone()
        ops_replay.commit_trunk(new_state, *trunk, *nodes, path)
        committed.append((new_state, trunk))
    assert torch.equal(committed[0][0], committed[1][0])
    assert torch.equal(committed[0][1][-1], committed[1][1][-1])
    for row, length in enumerate(committed[0][1][-1].tolist()):
        for one, other in zip(committed[0][1][:-1], committed[1][1][:-1], strict=True):
            assert torch.equal(one[:, row, :length], other[:, row, :length])


@pytest.mark.parametrize("slots", [4, 16])
def test_2000_steps_without_a_reset_stay_within_1e_4_of_float64(slots: int) -> None:
    generator = torch.Generator().manual_seed(11)
    state, trunk = torch.zeros(1, B, HV, K, V), empty_trunk(torch.float32, slots)
    plain, exact = state.clone(), state.double()
    rows, trees = torch.arange(B), (CHAIN, STAR, FORK)
    encoding = encode(*trees)
    for _ in range(2000):
        inputs = node_inputs(generator, torch.float32)
        inputs[3] = inputs[3] / 20
        paths = [random_path(tree.parents, generator) for tree in trees]
        path = torch.tensor(paths, dtype=torch.int32)
        _, u, g, r = verify(inputs, state[0], encoding, trunk)
        ops_replay.commit_trunk(state, *trunk, inputs[1][None], r[None], u[None], g[None], path)
        _, u, g, r = ops.tree_gated_delta(*inputs, plain[0], *tree_arguments(encoding), SCALE, NORM_EPS, torch.float32)
        ops.commit_state(plain, inputs[1][None], r[None], u[None], g[None], path)
        # The literal recurrence along the accepted paths alone, in float64.
        k = (inputs[1].double() / (inputs[1].double().square().sum(-1, keepdim=True) + NORM_EPS).sqrt()).repeat_interleave(2, 2)
        for step in range(N):
            node, on_path = path[:, step].long(), path[:, step] >= 0
            k_t, v_t, a_t, b_t = (x.double()[rows, node] for x in (k, inputs[2], inputs[3].exp(), inputs[4]))
            decayed = a_t[..., None, None] * exact[0]
            error = v_t - torch.einsum("bhkv,bhk->bhv", decayed, k_t)
            exact[0] = torch.where(
                on_path[:, None, None, None],
                decayed + b_t[..., None, None] * k_t[..., :, None] * error[..., None, :],
                exact[0],
            )
    ops.commit_state(state, *trunk[:-1], trunk_path(trunk[-1], slots))
    for committed in (state, plain):
        assert (committed - exact).norm() / exact.norm() < 1e-4


def test_opcheck() -> None:
    generator = torch.Generator().manual_seed(2)
    state, trunk = torch.randn(1, B, HV, K, V, generator=generator), empty_trunk(torch.float32)
    trunk = [torch.ones_like(x) for x in trunk]
    inputs, encoding = node_inputs(generator, torch.float32), encode(CHAIN, STAR, FORK)
    *tensors, length = trunk
    arguments = (*inputs, state[0], *tree_arguments(encoding), *(x[0] for x in tensors), length, SCALE, NORM_EPS, torch.float32)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops_replay.tree_gated_delta_trunk, arguments, test_utils=checks)
    _, u, g, r = verify(inputs, state[0], encoding, trunk)
    path = torch.tensor([[0, 1, -1, -1, -1]] * B, dtype=torch.int32)
    arguments = (state, *trunk, inputs[1][None], r[None], u[None], g[None], path)
    torch.library.opcheck(ops_replay.commit_trunk, arguments, test_utils=checks)


def test_a_trunk_of_another_shape_is_refused() -> None:
    generator = torch.Generator().manual_seed(2)
    inputs, encoding = node_inputs(generator, torch.float32), encode(CHAIN, STAR, FORK)
    state, trunk = torch.zeros(1, B, HV, K, V), empty_trunk(torch.float32)
    trunk[2] = trunk[2][..., :-1]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="trunk_values is"):
        verify(inputs, state[0], encoding, trunk)


def test_the_marker_raises_at_run_time() -> None:
    encoding = encode(CHAIN, STAR, FORK)
    *tensors, length = empty_trunk(torch.float32)
    with pytest.raises(RuntimeError, match="state_in_trunk reached run time"):
        ops_replay.state_in_trunk(torch.zeros(B, HV, K, V), *tree_arguments(encoding), *(x[0] for x in tensors), length, 0, 0)
