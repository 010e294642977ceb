"""One state a node: the op against the literal recurrence, the block that holds the committed state, and what rejection may touch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from treewy_inductor import ops_store_all, reference
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.reference_store_all import accepted_block, committed_state
from treewy_inductor.tree import DraftTree

FORK = DraftTree([-1, 0, 0, 1, 3])
FOREST = DraftTree([-1, -1, 1, 0])
ROOT_ALONE = DraftTree([-1])
B, N, HK, HV, K, V = 3, 5, 2, 4, 6, 5
SCALE, NORM_EPS = K**-0.5, 1e-6


def encode(*trees: DraftTree) -> TreeEncoding:
    return TreeEncoding(len(trees), N).fill(torch.stack([tree.padded(N) for tree in trees]))


def node_inputs(generator: torch.Generator, *, per_channel: bool = False, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return query, key, value, log_decay and beta of one step."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    log_decay = -torch.rand(B, N, HV, *([K] if per_channel else []), generator=generator, dtype=dtype)
    beta = 2 * torch.rand(B, N, HV, generator=generator, dtype=dtype)
    return [randn(B, N, HK, K), randn(B, N, HK, K), randn(B, N, HV, V), log_decay, beta]


@pytest.mark.parametrize("per_channel", [False, True])
def test_outputs_and_states_are_the_literal_recurrence(per_channel: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    encoding = encode(FORK, FOREST, ROOT_ALONE)
    inputs = node_inputs(generator, per_channel=per_channel)
    snapshots = torch.randn(B, N, HV, K, V, generator=generator, dtype=torch.float64)
    before, accepted = snapshots.clone(), torch.tensor([3, 0, 4], dtype=torch.int32)
    output = ops_store_all.tree_gated_delta_snapshots(
        *inputs, encoding.parents, accepted, snapshots, SCALE, NORM_EPS, torch.float64
    )
    state = before[torch.arange(B), accepted.long()]
    expected, states = reference.literal_gated_delta(*inputs, state, encoding.parents, SCALE, NORM_EPS)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-13)
    is_node = (encoding.parents >= -1)[..., None, None, None]
    torch.testing.assert_close(snapshots, torch.where(is_node, states, before), rtol=0, atol=1e-13)


def test_the_accepted_node_s_block_is_committed() -> None:
    parents = encode(FORK, FOREST, FORK).parents
    path = torch.tensor([[0, 1, 3, -1, -1], [0, -1, -1, -1, -1], [0, 2, -1, -1, -1]], dtype=torch.int32)
    assert accepted_block(torch.zeros(B, dtype=torch.int32), parents, path).tolist() == [3, 0, 2]


def test_an_empty_path_keeps_an_inert_row_and_loses_a_verified_one() -> None:
    parents = encode(FORK, FORK, FORK).parents
    parents[1] = -2
    accepted = accepted_block(torch.tensor([2, 2, 2], dtype=torch.int32), parents, torch.full((B, N), -1, dtype=torch.int32))
    assert accepted.tolist() == [-1, 2, -1]
    state = committed_state(torch.ones(B, N, HV, K, V), accepted)
    assert state[1].eq(1).all()
    assert state[[0, 2]].isnan().all()


def test_blocks_of_rejected_nodes_and_inert_nodes_inputs_change_no_bit() -> None:
    generator = torch.Generator().manual_seed(4)
    encoding, accepted = encode(FORK, FOREST, ROOT_ALONE), torch.tensor([1, 0, 0], dtype=torch.int32)
    clean = node_inputs(generator, dtype=torch.float32)
    dirty = [x.clone() for x in clean]
    inert = encoding.parents == -2
    for tensor in dirty:
        tensor[inert] = torch.nan
    snapshots = torch.randn(B, N, HV, K, V, generator=generator)
    spoiled = torch.full_like(snapshots, torch.nan)
    rows = torch.arange(B)
    spoiled[rows, accepted.long()] = snapshots[rows, accepted.long()]
    outputs = [
        ops_store_all.tree_gated_delta_snapshots(*inputs, encoding.parents, accepted, blocks, SCALE, NORM_EPS, torch.float32)
        for inputs, blocks in ((clean, snapshots), (dirty, spoiled))
    ]
    assert torch.equal(*outputs)
    assert torch.equal(snapshots[~inert], spoiled[~inert])


def test_opcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, parents = node_inputs(generator, dtype=torch.float32), encode(FORK, FOREST, ROOT_ALONE).parents
    arguments = (
        *inputs,
        parents,
        torch.zeros(B, dtype=torch.int32),
        torch.zeros(B, N, HV, K, V),
        SCALE,
        NORM_EPS,
        torch.bfloat16,
    )
    torch.library.opcheck(ops_store_all.tree_gated_delta_snapshots, arguments, test_utils=("test_schema", "test_faketensor"))


def test_snapshots_of_another_tree_size_are_refused() -> None:
    inputs, parents = node_inputs(torch.Generator()), encode(FORK, FOREST, ROOT_ALONE).parents
    accepted, snapshots = torch.zeros(B, dtype=torch.int32), torch.zeros(B, N + 1, HV, K, V)
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(RuntimeError, match=r"snapshots is \[3, 6, 4, 6, 5\], expected \[3, 5, 4, 6, 5\]"),
    ):
        ops_store_all.tree_gated_delta_snapshots(*inputs, parents, accepted, snapshots, SCALE, NORM_EPS, torch.float64)


def test_the_markers_raise_at_run_time() -> None:
    snapshots, row = torch.zeros(B, N, HV, K, V), torch.zeros(B, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="state_in_snapshots reached run time"):
        ops_store_all.state_in_snapshots(snapshots, row, torch.zeros(B, N, dtype=torch.int32), 0, 0)
    with pytest.raises(RuntimeError, match="state_out_snapshots reached run time"):
        ops_store_all.state_out_snapshots(snapshots[:, 0], snapshots, HK, 0, 0)


def test_2000_steps_without_a_reset_stay_within_1e_4_of_float64() -> None:
    generator = torch.Generator().manual_seed(11)
    encoding = encode(FORK, FOREST, ROOT_ALONE)
    by_row = (((0, 1, 3, 4), (0, 1, -1, -1), (0, 2, -1, -1)), ((0, 3, -1, -1), (1, 2, -1, -1), (0, -1, -1, -1)))
    # [choices, B, P]; the third row's tree is its root.
    paths = torch.tensor((*by_row, ((0, -1, -1, -1),) * 3), dtype=torch.int32).transpose(0, 1)
    snapshots, accepted = torch.zeros(B, N, HV, K, V), torch.zeros(B, dtype=torch.int32)
    exact, rows = torch.zeros(B, HV, K, V, dtype=torch.float64), torch.arange(B)
    for _ in range(2000):
        inputs = node_inputs(generator, dtype=torch.float32)
        inputs[3] = inputs[3] / 20
        path = paths[int(torch.randint(3, (), generator=generator))]
        ops_store_all.tree_gated_delta_snapshots(*inputs, encoding.parents, accepted, snapshots, SCALE, NORM_EPS, torch.float32)
        accepted = accepted_block(accepted, encoding.parents, path)
        wide = [x.double() for x in inputs]
        _, states = reference.literal_gated_delta(*wide, exact, encoding.parents, SCALE, NORM_EPS)
        exact = states[rows, accepted.long()]
    committed = committed_state(snapshots, accepted)
    assert (committed - exact).norm() / exact.norm() < 1e-4
