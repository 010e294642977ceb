"""The kernels of commits compiled to machine code of an H200 and a B200 where neither is, and those of verification for AMD.

Verification on NVIDIA's chips has a file of its own: test_offline_configurations.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

triton = pytest.importorskip("triton")

from bench.kernel_cases import Shape  # noqa: E402
from tests.described_launches import commit_state_launches, verify_launches  # noqa: E402
from tests.offline_compile import B200, H200, MI355X, Recorder, compile_launch, described, resources  # noqa: E402
from treewy_inductor.lowerings.commit_conv import launch_commit_conv  # noqa: E402
from treewy_inductor.lowerings.commit_keys_values import launch_commit_keys_values  # noqa: E402
from treewy_inductor.lowerings.launch import Launch  # noqa: E402
from treewy_inductor.lowerings.verify_arguments import has_bulk_prefetch  # noqa: E402

SHARED_LIMIT = {H200: 232448, B200: 232448}
TARGETS = pytest.mark.parametrize("target", [H200, B200], ids=["sm_90a", "sm_100a"])


def commit_launches() -> list[Launch]:
    recorder, (L, B, N) = Recorder(), (4, 8, 40)
    path = described((B, N), torch.int32)
    launch_commit_conv(recorder, described((L, B, 999, 4), torch.bfloat16), described((L, B, 999, N), torch.bfloat16), path)
    rows = described((L, B, 2, 300, 256), torch.bfloat16)
    launch_commit_keys_values(recorder, rows, rows, described((B,), torch.int64), path)
    return [*commit_state_launches(N, Shape(), L, B), *recorder.launches]


@TARGETS
@pytest.mark.parametrize("which", [0, 1, 2], ids=["state", "conv", "keys_values"])
def test_commits(target: object, which: int) -> None:
    found = resources(compile_launch(commit_launches()[which], target))
    assert found.stack == 0
    assert found.shared <= SHARED_LIMIT[target]


@pytest.fixture
def for_amd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the host wrappers choose what they choose on a build of PyTorch for AMD."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    has_bulk_prefetch.cache_clear()
    yield
    has_bulk_prefetch.cache_clear()


@pytest.mark.usefixtures("for_amd")
@pytest.mark.parametrize("which", [0, 1, 2], ids=["state", "conv", "keys_values"])
def test_commits_for_amd(which: int) -> None:
    machine_code = compile_launch(commit_launches()[which], MI355X).asm["amdgcn"]
    assert "gfx950" in machine_code
    assert used_by_amd(machine_code, "vgpr_spill_count") == 0


@pytest.mark.usefixtures("for_amd")
@pytest.mark.parametrize(
    ("nodes", "shape"),
    [(15, Shape()), (100, Shape()), (15, Shape(dtype=torch.float16)), (15, Shape(dtype=torch.float32))],
    ids=["15-bf16", "100-bf16", "15-fp16", "15-fp32"],
)
def test_verify_for_amd(nodes: int, shape: Shape) -> None:
    for launch in verify_launches(nodes, shape):
        machine_code = compile_launch(launch, MI355X).asm["amdgcn"]
        assert "gfx950" in machine_code and "v_mfma" in machine_code
        assert used_by_amd(machine_code, "group_segment_fixed_size") <= 163840
        assert used_by_amd(machine_code, "vgpr_spill_count") == 0


def used_by_amd(machine_code: str, name: str) -> int:
    """Return an entry of the kernel's own description."""
    return int(re.search(rf"\.{name}:\s+(\d+)", machine_code)[1])  # type: ignore[index]
