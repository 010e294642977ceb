"""The combined ops: schemas and fakes agree with their meaning, which is that of the ops they combine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from treewy_inductor import ops_combined, reference
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.tree import DraftTree

TREES = (DraftTree.from_parents([-1, 0, 0, 1, 3, 2, 4]), DraftTree.from_parents([-1, -1, 0, 2, 3]))

NO_WINDOW = torch.zeros(2, 7, 0, dtype=torch.int32)


def convolution(dtype: torch.dtype = torch.float32, bias: bool = True, held: float = 0.5) -> tuple[Any, ...]:
    """Return the arguments of tree_conv_silu; the second row has five nodes, and the inert ones hold ``held``."""
    inputs, history = torch.randn(2, 7, 5).to(dtype).transpose(1, 2), torch.randn(2, 5, 4).to(dtype)
    inputs[1, :, 5:] = held
    weight, shift = torch.randn(5, 4).to(dtype), torch.randn(5).to(dtype)
    return inputs, history, weight, shift if bias else None, TreeEncoding.of(*TREES).window, 1, 2, 2


CASES = (
    pytest.param(ops_combined.tree_conv_silu, lambda: convolution(), id="conv"),
    pytest.param(ops_combined.tree_conv_silu, lambda: convolution(torch.bfloat16, bias=False), id="conv-bf16"),
    pytest.param(ops_combined.narrow_products, lambda: (torch.randn(6, 8), torch.randn(8, 3), torch.randn(8, 2)), id="narrow"),
    pytest.param(ops_combined.best_token, lambda: (torch.randn(2, 3, 9),), id="best_token"),
)


@pytest.mark.parametrize(("op", "arguments"), CASES)
def test_schema_fake_kernel_and_layouts(op: Any, arguments: Any) -> None:
    given = arguments()
    passed = torch.library.opcheck(op, given, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"))
    assert set(passed.values()) == {"SUCCESS"}
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = op(*given)
    real = op(*given)
    for a, b in zip(*((x,) if isinstance(x, Tensor) else x for x in (real, fake)), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_convolution_is_activated_before_it_is_rounded(dtype: torch.dtype, bias: bool) -> None:
    arguments = convolution(dtype, bias, torch.nan)
    got, kept, part = ops_combined.tree_conv_silu(*arguments)
    *floats, window = (x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments[:5])
    exact = torch.nn.functional.silu(reference.tree_causal_conv1d(*floats, window))  # type: ignore[arg-type]
    # One rounding to the dtype; of float32, a few more in the sum and the exponential.
    bound = 2.0**-8 if dtype == torch.bfloat16 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=bound, atol=bound)
    assert (got[1, :, 5:] == 0).all()
    assert torch.equal(kept.nan_to_num(7), arguments[0].nan_to_num(7))
    assert kept.data_ptr() != arguments[0].data_ptr()
    assert torch.equal(part, got.transpose(1, 2)[..., 1:].unflatten(2, (2, 2)))


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        (
            ops_combined.tree_conv_silu,
            (*convolution()[:2], torch.zeros(5, 3), *convolution()[3:]),
            r"weight \[5, 3\] for inputs",
        ),
        (
            ops_combined.tree_conv_silu,
            (torch.zeros(2, 5, 7), *(torch.zeros(2, 5, 1), torch.zeros(5, 1), None), NO_WINDOW, 0, 0, 0),
            "a kernel of 1 sees no ancestor: use tree_causal_conv1d",
        ),
        (ops_combined.tree_conv_silu, (*convolution()[:5], 2, 2, 2), "2 heads of 2 from channel 2 on do not lie in 5 channels"),
        (ops_combined.narrow_products, (torch.zeros(6, 8), torch.zeros(7, 3), torch.zeros(8, 2)), r"left \[7, 3\]"),
        (ops_combined.narrow_products, (torch.zeros(6, 8), torch.zeros(8, 3), torch.zeros(8, 2).double()), "torch.float64"),
    ],
)
def test_wrong_arguments_are_named(op: Any, arguments: tuple[Any, ...], message: str) -> None:
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=message):
        op(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments))
