"""The lowered convolution along a tree's paths equals its reference, fused and in every dtype, and never meets NaN elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from treewy_inductor import ops, reference
from treewy_inductor.backend import treewy
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.tree import DraftTree

TREES = (DraftTree.from_parents([-1, 0, 0, 1, 3, 2, 4]), DraftTree.from_parents([-1, -1, 0, 2, 3]))


def _operands(dtype: torch.dtype, bias: bool) -> tuple[Tensor, ...]:
    inputs, history = torch.randn(2, 5, 7).to(dtype), torch.randn(2, 5, 4).to(dtype)
    # The second row has five nodes; what an inert one holds must not be seen.
    inputs[1, :, 5:] = torch.nan
    weight, shift = torch.randn(5, 4).to(dtype), torch.randn(5).to(dtype)
    return inputs, history, weight, shift if bias else None, TreeEncoding.of(*TREES).window  # type: ignore[return-value]


def _convolve(inputs: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor) -> Tensor:
    return torch.nn.functional.silu(ops.tree_causal_conv1d(inputs * 2, history, weight, bias, window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_compiled_convolution_equals_reference_and_fuses(dtype: torch.dtype, bias: bool) -> None:
    operands = _operands(dtype, bias)
    with torch.no_grad():
        compiled = torch.compile(_convolve, backend=treewy, fullgraph=True, dynamic=False)
        got, (code, *_) = run_and_get_code(compiled, *operands)
    inputs, *rest = (None if x is None else x.double() if x.is_floating_point() else x for x in operands)
    assert inputs is not None
    expected = torch.nn.functional.silu(reference.tree_causal_conv1d(inputs * 2, *rest))  # type: ignore[arg-type]
    # The result is rounded once to its dtype; inside, four products are summed in float32.
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    assert got.stride() == (35, 1, 5)
    assert "torch.ops.treewy.tree_causal_conv1d" not in code
