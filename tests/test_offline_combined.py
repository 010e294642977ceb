"""The combined ops' kernels compiled to machine code of an H200 and a B200: vectors, matrix unit, and nothing spilled."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from tests.offline_compile import B200, H200, Recorder, compile_launch, described, resources
from treewy_inductor.lowerings.launch import Launch
from treewy_inductor.lowerings.narrow_products import launch_narrow_products
from treewy_inductor.lowerings.tree_conv_silu import launch_tree_conv_silu

TARGETS = pytest.mark.parametrize("target", [H200, B200], ids=["sm_90a", "sm_100a"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


def convolution(dtype: torch.dtype, rows: int) -> Launch:
    """Return what is launched for rows of 40 nodes and the channels of a 4B model, laid out as it and a TreeCache do."""
    recorder = Recorder()
    B, N, C, K = rows, 40, 8192, 4
    inputs, history = described((B, C, N), dtype, (N * C, 1, C)), described((B, C, K), dtype)
    window = described((B, N, K - 1), torch.int32)
    launch_tree_conv_silu(recorder, inputs, history, described((C, K), dtype), None, window, 2048, 16, 128)
    return recorder.launches[0]


@TARGETS
@DTYPES
@pytest.mark.parametrize("rows", [1, 16])
def test_convolution_moves_vectors_and_spills_nothing(target: object, dtype: torch.dtype, rows: int) -> None:
    compiled = compile_launch(convolution(dtype, rows), target)
    found = resources(compiled)
    assert found.stack == found.local == 0
    # A node's ancestors are whole rows, so a thread takes 16 bytes of each, as of its own and of what it stores.
    ptx = compiled.asm["ptx"]
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 4
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) >= 2


@TARGETS
@pytest.mark.parametrize(("rows", "size"), [(40, 2560), (640, 2560), (640, 1024)])
def test_narrow_products_use_the_matrix_unit_and_spill_nothing(target: object, rows: int, size: int) -> None:
    recorder = Recorder()
    weights = (described((size, 32), torch.bfloat16, (1, size)) for _ in range(2))
    launch_narrow_products(recorder, described((rows, size), torch.bfloat16), *weights)
    found = resources(compile_launch(recorder.launches[0], target))
    assert found.stack == found.local == 0
    assert found.matrix_instructions
    assert not found.unfenced
