"""Every kernel compiled to machine code of an H200 and a B200 where neither is: target, matrix unit, shared memory.

What a thread spills is held against a bound a shape: a change that makes a kernel lose its registers fails here, before it
meets a GPU. Exact register counts belong to a compiler version and are not asserted.
"""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.offline_compile import B200, H200, MI355X, Recorder, compile_launch, described, resources  # noqa: E402
from treewy_inductor.lowerings.commit_conv import launch_commit_conv  # noqa: E402
from treewy_inductor.lowerings.commit_keys_values import launch_commit_keys_values  # noqa: E402
from treewy_inductor.lowerings.commit_state import launch_commit_state  # noqa: E402
from treewy_inductor.lowerings.launch import Launch, Strided  # noqa: E402
from treewy_inductor.lowerings.tree_gated_delta import launch_tree_gated_delta  # noqa: E402

SHARED_LIMIT = {H200: 232448, B200: 232448}
TARGETS = pytest.mark.parametrize("target", [H200, B200], ids=["sm_90a", "sm_100a"])


def verify_launch(
    N: int, K: int = 128, V: int = 128, dtype: torch.dtype = torch.bfloat16, HK: int = 16, groups: int = 2
) -> Launch:
    B, HV = 8, HK * groups
    row = 2 * HK * K + HV * V

    def head(heads: int, dim: int) -> Strided:
        return described((B, N, heads, dim), dtype, (N * row, row, dim, 1))

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Strided:
        return described(shape, dtype)

    recorder = Recorder()
    launch_tree_gated_delta(
        recorder,
        *(head(HK, K), head(HK, K), head(HV, V), described((B, N, HV), torch.float32), described((B, N, HV), dtype)),
        described((B, HV, K, V), torch.float32, (HV * K * V, K * V, 1, K)),
        *(ints(B, N, -(-N // 64), dtype=torch.int64), ints(B, N), ints(B), ints(B), K**-0.5, 1e-6, dtype),
    )
    assert len(recorder.launches) == 1
    return recorder.launches[0]


def commit_launches() -> list[Launch]:
    L, B, N, HK, HV, K, V = 4, 8, 40, 16, 32, 128, 128
    recorder = Recorder()
    path = described((B, N), torch.int32)
    launch_commit_state(
        recorder,
        described((L, B, HV, K, V), torch.float32, (B * HV * K * V, HV * K * V, K * V, 1, K)),
        described((L, B, N, HK, K), torch.bfloat16),
        *(described((L, B, N, HK), torch.float32), described((L, B, N, HV, V), torch.float32)),
        *(described((L, B, N, HV), torch.float32), path),
    )
    launch_commit_conv(recorder, described((L, B, 999, 4), torch.bfloat16), described((L, B, 999, N), torch.bfloat16), path)
    rows = described((L, B, 2, 300, 256), torch.bfloat16)
    launch_commit_keys_values(recorder, rows, rows, described((B,), torch.int64), path)
    return recorder.launches


@TARGETS
@pytest.mark.parametrize(("nodes", "spilled"), [(15, 16), (40, 1200)])
def test_verify_uses_the_wide_matrix_unit(target: object, nodes: int, spilled: int) -> None:
    found = resources(compile_launch(verify_launch(nodes), target))
    assert found.target == ("sm_90a" if target is H200 else "sm_100a")
    assert ("wgmma.mma_async" if target is H200 else "tcgen05.mma") in found.matrix_instructions
    assert found.shared <= SHARED_LIMIT[target]
    assert found.stack <= spilled


@TARGETS
@pytest.mark.parametrize("dims", [(96, 192), (256, 256)], ids=str)
def test_verify_at_other_head_dims(target: object, dims: tuple[int, int]) -> None:
    found = resources(compile_launch(verify_launch(17, *dims, groups=1), target))
    assert found.shared <= SHARED_LIMIT[target]
    assert found.matrix_instructions


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_input_types_multiply_in_tf32(dtype: torch.dtype) -> None:
    compiled = compile_launch(verify_launch(4, 64, 64, dtype), H200)
    assert "tf32" in compiled.asm["ptx"]
    assert resources(compiled).shared <= SHARED_LIMIT[H200]


@TARGETS
@pytest.mark.parametrize("which", [0, 1, 2], ids=["state", "conv", "keys_values"])
def test_commits(target: object, which: int) -> None:
    found = resources(compile_launch(commit_launches()[which], target))
    assert found.stack == 0
    assert found.shared <= SHARED_LIMIT[target]


def test_commit_of_convolution_compiles_for_amd() -> None:
    assert "gfx950" in compile_launch(commit_launches()[1], MI355X).asm["amdgcn"]
