"""The fused commit as Inductor writes it for an H200: states are overwritten where they lie, and copied nowhere."""

from __future__ import annotations

import re
import unittest.mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.generated_source import source_for
from treewy_inductor import ops_fused
from treewy_inductor.lowerings.on_gpu import register_once

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="a CUDA build of torch asks the driver, which is not here; a CPU build takes the answers that it is given",
)
B, HK, HV, K, V = 2, 2, 4, 128, 128


def arguments(N: int) -> tuple[Tensor, ...]:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device="cuda", dtype=dtype)

    bf16, ints = torch.bfloat16, torch.int32
    heads = empty(B, N, HK, K, dtype=bf16), empty(B, N, HK, K, dtype=bf16), empty(B, N, HV, V, dtype=bf16)
    tree = empty(B, N, 1, dtype=torch.int64), empty(B, N, dtype=ints), empty(B, dtype=ints), empty(B, dtype=ints)
    trunk = empty(B, N, HK, K, dtype=bf16), empty(B, N, HK), empty(B, N, HV, V), empty(B, N, HV), empty(B, dtype=ints)
    kept = empty(B, N, HV, V), empty(B, N, HV), empty(B, N, HK)
    return *heads, empty(B, N, HV), empty(B, N, HV), empty(B, HV, V, K).transpose(2, 3), *tree, *trunk, *kept


def layer(*inputs: Tensor) -> Tensor:
    *rest, pseudo_values, path_decay, key_scale = inputs
    output, *left = ops_fused.tree_gated_delta_fused(*rest, K**-0.5, 1e-6, torch.bfloat16)
    for buffer, value in zip((pseudo_values, path_decay, key_scale), left, strict=True):
        buffer.copy_(value)
    # The trunk's length.
    inputs[14].zero_()
    return torch.relu(output)


@pytest.mark.parametrize(
    ("nodes", "kernels"),
    [(15, ["tree_gated_delta_fused_kernel"]), (40, ["fold_state_kernel", "tree_gated_delta_kernel"])],
)
def test_the_state_is_overwritten_in_place(nodes: int, kernels: list[str]) -> None:
    register_once()
    try:
        source, written = source_for(layer, lambda: arguments(nodes))
    except (AttributeError, unittest.mock.InvalidSpecError) as error:
        pytest.skip(f"this torch asks for its device elsewhere: {error}")
    call = source[source.index("def call(") :]
    launched = re.findall(r"(\w+_kernel)_\d+\.run\((.*)\)", call)
    assert [name for name, _ in launched][: len(kernels)] == kernels
    assert all("arg5_1" in operands for _, operands in launched[: len(kernels)])
    assert "torch.ops.treewy" not in source
    # Nothing as large as a state is allocated, and no kernel of Inductor's own is given one.
    assert f"empty_strided_cuda(({B}, {HV}, {K}, {V})" not in call
    assert not [line for line in call.splitlines() if "triton_" in line and "arg5_1" in line]
    # The state, the trunk's length and what the next commit needs.
    assert written == {"arg5_1", "arg14_1", "arg15_1", "arg16_1", "arg17_1"}
