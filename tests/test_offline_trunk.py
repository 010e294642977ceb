"""The kernels of replay compiled to an H200's machine code where none is: a trunk must not cost the registers of the stream."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.offline_compile import H200, Recorder, compile_launch, described, resources  # noqa: E402
from treewy_inductor.lowerings.commit_trunk import launch_commit_trunk  # noqa: E402
from treewy_inductor.lowerings.launch import Launch, Strided  # noqa: E402
from treewy_inductor.lowerings.tree_gated_delta import launch_tree_gated_delta  # noqa: E402

L, B, HK, HV, K, V, SLOTS = 4, 64, 16, 32, 128, 128, 16


def bf16(*shape: int) -> Strided:
    return described(shape, torch.bfloat16)


def fp32(*shape: int) -> Strided:
    return described(shape, torch.float32)


def ints(*shape: int) -> Strided:
    return described(shape, torch.int32)


def verify_launch(N: int, slots: int) -> Launch:
    recorder = Recorder()
    trunk = bf16(B, slots, HK, K), fp32(B, slots, HK), fp32(B, slots, HV, V), fp32(B, slots, HV), ints(B)
    launch_tree_gated_delta(
        recorder,
        *(bf16(B, N, HK, K), bf16(B, N, HK, K), bf16(B, N, HV, V), fp32(B, N, HV), bf16(B, N, HV)),
        described((B, HV, K, V), torch.float32, (HV * K * V, K * V, 1, K)),
        *(described((B, N, 1), torch.int64), ints(B, N), ints(B), ints(B), K**-0.5, 1e-6, torch.bfloat16),
        trunk=trunk if slots else None,
    )
    return recorder.launches[0]


@pytest.mark.parametrize(("nodes", "more"), [(4, 128), (40, 500)])
def test_a_trunk_spills_little_more_than_none(nodes: int, more: int) -> None:
    without, with_trunk = (resources(compile_launch(verify_launch(nodes, slots), H200)) for slots in (0, SLOTS))
    assert with_trunk.stack <= without.stack + more
    assert "wgmma.mma_async" in with_trunk.matrix_instructions


def test_a_commit_spills_nothing() -> None:
    recorder, N = Recorder(), 4
    launch_commit_trunk(
        recorder,
        described((L, B, HV, K, V), torch.float32, (B * HV * K * V, HV * K * V, K * V, 1, K)),
        *(bf16(L, B, SLOTS, HK, K), fp32(L, B, SLOTS, HK), fp32(L, B, SLOTS, HV, V), fp32(L, B, SLOTS, HV), ints(B)),
        *(bf16(L, B, N, HK, K), fp32(L, B, N, HK), fp32(L, B, N, HV, V), fp32(L, B, N, HV), ints(B, N)),
    )
    assert [launch.kernel.fn.__name__ for launch in recorder.launches] == [
        "fold_trunk_kernel",
        "append_trunk_kernel",
        "trunk_length_kernel",
    ]
    assert all(resources(compile_launch(launch, H200)).stack == 0 for launch in recorder.launches)
