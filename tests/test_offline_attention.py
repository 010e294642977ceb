"""The attention kernels compiled to machine code of an H200 and a B200: matrix unit, shared memory, and nothing spilled."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from tests.offline_compile import B200, H200, Recorder, compile_launch, described, resources
from treewy_inductor.lowerings.launch import Launch
from treewy_inductor.lowerings.tree_attention import launch_tree_attention

SHARED_LIMIT = 232448
TARGETS = pytest.mark.parametrize("target", [H200, B200], ids=["sm_90a", "sm_100a"])


def launches(batch: int, dtype: torch.dtype, dim: int = 256, nodes: int = 40, positions: int = 2048) -> list[Launch]:
    """Return what is launched for 2 key heads of 4 query heads each, laid out as a model and a TreeCache do."""
    recorder = Recorder()
    recorder.launches = []
    H, HK, words = 8, 2, -(-nodes // 64)
    row = nodes * (words + 1)
    cache = described((batch, HK, positions, dim), dtype)
    launch_tree_attention(
        recorder,
        described((batch, H, nodes, dim), dtype, (nodes * H * dim, dim, H * dim, 1)),
        *(cache, cache, described((batch, nodes, words), torch.int64, (row, words + 1, 1))),
        *(described((batch,), torch.int64, (row,)), dim**-0.5),
    )
    return recorder.launches


@TARGETS
@pytest.mark.parametrize("batch", [1, 64])
def test_attention_uses_the_wide_matrix_unit_and_spills_nothing(target: object, batch: int) -> None:
    written = launches(batch, torch.bfloat16)
    # One row has few programs, so its positions are split and a second kernel sums the parts.
    assert len(written) == (2 if batch == 1 else 1)
    for index, launch in enumerate(written):
        found = resources(compile_launch(launch, target))
        assert found.target == ("sm_90a" if target is H200 else "sm_100a")
        assert found.stack == found.local == 0
        assert found.shared <= SHARED_LIMIT
        if index == 0:
            assert ("wgmma.mma_async" if target is H200 else "tcgen05.mma") in found.matrix_instructions


@TARGETS
@pytest.mark.parametrize("dim", [64, 128])
def test_smaller_heads_spill_nothing(target: object, dim: int) -> None:
    found = resources(compile_launch(launches(16, torch.bfloat16, dim, nodes=100)[0], target))
    assert found.stack == found.local == 0


@TARGETS
@pytest.mark.parametrize("dim", [128, 256])
def test_float32_multiplies_in_three_tf32_terms(target: object, dim: int) -> None:
    compiled = compile_launch(launches(16, torch.float32, dim)[0], target)
    assert "tf32" in compiled.asm["ptx"]
    found = resources(compiled)
    assert found.shared <= SHARED_LIMIT
    assert found.stack == found.local == 0


def test_the_cache_is_copied_to_shared_memory_in_vectors() -> None:
    ptx = compile_launch(launches(64, torch.bfloat16)[0], H200).asm["ptx"]
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (0x\w+)", ptx)
    # Eight bytes are a row's ancestor bits.
    assert sizes.count("0x10") >= 32 and set(sizes) <= {"0x10", "0x8"}
