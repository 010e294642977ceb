"""The kernels of the commit policies against the reference, in Triton's interpreter: float32, since it multiplies bfloat16 wrongly.

The interpreter is chosen when a kernel is defined, so the comparison runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.trees import BRANCHES, CHAIN, INERT_BETWEEN, batch_of, random_parents
from treewy_inductor import reference_replay, reference_store_all
from treewy_inductor.aligned_zeros import aligned_zeros
from treewy_inductor.encoding import derive
from treewy_inductor.lowerings.configurations import VerifyTile

L, B, HK, HV, K, V = 2, 3, 2, 4, 16, 24
SCALE, NORM_EPS = K**-0.5, 1e-6


def links() -> Tensor:
    return batch_of(BRANCHES, CHAIN, INERT_BETWEEN)


def inputs(generator: torch.Generator, parents: Tensor) -> list[Tensor]:
    """Return query, key, value, log_decay and beta of the trees ``[B, N]``, NaN at inert nodes."""
    nodes = parents.shape[1]

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    drawn = [randn(B, nodes, HK, K), randn(B, nodes, HK, K), randn(B, nodes, HV, V), -randn(B, nodes, HV).abs()]
    drawn.append(torch.rand(B, nodes, HV, generator=generator))
    for tensor in drawn:
        tensor[parents == -2] = torch.nan
    return drawn


def trunk(generator: torch.Generator, slots: int, lengths: list[int]) -> list[Tensor]:
    """Return a trunk of these lengths in every layer, NaN in the slots beyond."""
    shapes = (HK, K), (HK,), (HV, V), (HV,)
    tensors = [torch.randn((L, B, slots, *shape), generator=generator) for shape in shapes]
    tensors[1] = tensors[1].abs()
    tensors[3] = -tensors[3].abs().cumsum(2)
    for tensor in tensors:
        for row, length in enumerate(lengths):
            tensor[:, row, length:] = torch.nan
    return [*tensors, torch.tensor(lengths, dtype=torch.int32)]


def in_layers(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as a cache holds it: each layer begins at a multiple of 16 bytes."""
    layers = aligned_zeros(*tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return layers.copy_(tensor)


def check_snapshots() -> None:
    from treewy_inductor.lowerings.launch import EAGER
    from treewy_inductor.lowerings.tree_gated_delta_snapshots import launch_tree_gated_delta_snapshots

    generator, parents = torch.Generator().manual_seed(0), links()
    N = parents.shape[1]
    case = inputs(generator, parents)
    snapshots = torch.randn(B, N, HV, V, K, generator=generator).transpose(3, 4)
    accepted = torch.tensor([2, 0, 1], dtype=torch.int32)
    expected_blocks = snapshots.clone()
    expected = reference_store_all.tree_gated_delta_snapshots(
        *case, parents, accepted, expected_blocks, SCALE, NORM_EPS, torch.float32
    )
    output = launch_tree_gated_delta_snapshots(
        EAGER, *case, parents, accepted, snapshots, SCALE, NORM_EPS, torch.float32
    ).handle
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(snapshots, expected_blocks, rtol=1e-5, atol=1e-5)


def check_trunk(parents: Tensor | None = None) -> None:
    from treewy_inductor.lowerings.launch import EAGER
    from treewy_inductor.lowerings.tree_gated_delta import launch_tree_gated_delta

    generator, parents = torch.Generator().manual_seed(1), links() if parents is None else parents
    case = inputs(generator, parents)
    state = torch.randn(B, HV, V, K, generator=generator).transpose(2, 3)
    ancestors, _, _, order, internal, height = derive(parents, 4)
    tree = ancestors, order, internal, height
    for slots, lengths in ((5, [0, 3, 5]), (19, [17, 1, 19])):
        *tensors, length = trunk(generator, slots, lengths)
        layer = [tensor[0] for tensor in tensors]
        expected = reference_replay.tree_gated_delta_trunk(*case, state, *tree, *layer, length, SCALE, NORM_EPS, torch.float32)
        arguments = *case, state, *tree, SCALE, NORM_EPS, torch.float32
        for tile in (VerifyTile(64, 4, 32, 2), None):
            found = launch_tree_gated_delta(EAGER, *arguments, trunk=(*layer, length), verify=tile)
            for result, exact in zip(found, expected, strict=True):
                torch.testing.assert_close(result.handle, exact, rtol=1e-4, atol=2e-5)
        kept = [torch.empty_like(result.handle) for result in found[1:]]
        launch_tree_gated_delta(EAGER, *arguments, trunk=(*layer, length), into=kept)
        for buffer, result in zip(kept, found[1:], strict=True):
            torch.testing.assert_close(buffer, result.handle, rtol=0, atol=0)


def check_trunk_of_leaves() -> None:
    # One block of internal nodes; 16 leaves are multiplied in another way than 48.
    for leaves in (16, 45):
        check_trunk(batch_of([-1, *range(9), *([0, 3, 9] * 20)[:leaves]], random_parents(20, 1, inert=0.2), CHAIN))


def check_trunk_of_blocks() -> None:
    check_trunk(batch_of([*range(-1, 34)], random_parents(35, 2), CHAIN))


def check_commit() -> None:
    from treewy_inductor.lowerings import commit_trunk
    from treewy_inductor.lowerings.launch import EAGER

    generator, parents = torch.Generator().manual_seed(2), links()
    N = parents.shape[1]
    path = torch.full((B, N), -1, dtype=torch.int32)
    path[0, :3], path[2, :1] = torch.tensor([0, 1, 3]), 0
    deep = torch.full((B, N), -1, dtype=torch.int32)
    deep[0], deep[1, :5] = torch.arange(N), torch.arange(5)
    assert not in_layers(torch.zeros(L, B, 5, HK)).is_contiguous()
    for slots, lengths, steps in (
        (5, [2, 3, 5], path),
        (5, [3, 0, 0], path),
        (20, [18, 0, 19], path),
        (1, [1, 0, 0], path),
        (9, [0, 4, 9], deep),
        (9, [1, 5, 0], deep),
    ):
        held = trunk(generator, slots, lengths)
        case = inputs(generator, parents)
        u, g = torch.randn(L, B, N, HV, V, generator=generator), -torch.rand(L, B, N, HV, generator=generator)
        nodes = case[1].expand(L, -1, -1, -1, -1).contiguous(), torch.rand(L, B, N, HK, generator=generator), u, g
        held, nodes = [*map(in_layers, held[:-1]), held[-1]], tuple(map(in_layers, nodes))
        state = torch.randn(L, B, HV, V, K, generator=generator).transpose(3, 4)
        expected_state, expected = state.clone(), [tensor.clone() for tensor in held]
        reference_replay.commit_trunk(expected_state, *expected, *nodes, steps)
        # Programs of one unit and one append a row; then of many units, and many appends a row.
        for programs, appended in ((commit_trunk.FOLD_PROGRAMS, commit_trunk.APPENDED), (1, 32)):
            found_state, found_trunk = state.clone(), [*map(in_layers, held[:-1]), held[-1].clone()]
            with mock.patch.multiple(commit_trunk, FOLD_PROGRAMS=programs, APPENDED=appended):
                commit_trunk.launch_commit_trunk(EAGER, found_state, *found_trunk, *nodes, steps)
            torch.testing.assert_close(found_state, expected_state, rtol=1e-5, atol=1e-5)
            for found, exact in zip(found_trunk, expected, strict=True):
                torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "check", ["check_snapshots", "check_trunk", "check_trunk_of_leaves", "check_trunk_of_blocks", "check_commit"]
)
def test_kernel_equals_reference(check: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", f"from tests import test_policy_kernels as t; t.{check}()"]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
