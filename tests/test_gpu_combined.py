"""The combined ops on a GPU: eager and compiled kernels against their reference, and NaN where nobody may look."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from bench.whole_step import random_trees
from treewy_inductor import ops, ops_combined, reference
from treewy_inductor.backend import _register_lowerings
from treewy_inductor.encoding import derive
from treewy_inductor.tree import INERT

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


@pytest.fixture(autouse=True)
def kernels() -> None:
    _register_lowerings()
    # Each case compiles the same function for other shapes, which is more than Dynamo thinks sane.
    torch._dynamo.reset()


def convolution(rows: int, nodes: int, channels: int, dtype: torch.dtype, bias: bool) -> tuple[Tensor | None, ...]:
    parents = random_trees(rows, nodes, random.Random(nodes)).cuda()
    inputs, history = torch.randn(rows, nodes, channels, device="cuda"), torch.randn(rows, channels, 4, device="cuda")
    inputs[parents == INERT] = torch.nan
    weight, shift = torch.randn(channels, 4, device="cuda").to(dtype), torch.randn(channels, device="cuda").to(dtype)
    return inputs.to(dtype).transpose(1, 2), history.to(dtype), weight, shift if bias else None, derive(parents, 4)[2]


CONVOLUTIONS = pytest.mark.parametrize(
    ("rows", "nodes", "channels"), [(1, 40, 6144), (16, 40, 8192), (3, 2, 70), (5, 256, 130)]
)


@DTYPES
@CONVOLUTIONS
def test_convolution_equals_reference(dtype: torch.dtype, rows: int, nodes: int, channels: int) -> None:
    inputs, history, weight, bias, window = convolution(rows, nodes, channels, dtype, bias=rows != 16)
    assert inputs is not None and window is not None
    wide = [None if x is None else x.double() for x in (inputs, history, weight, bias)]
    exact = torch.nn.functional.silu(reference.tree_causal_conv1d(*wide, window))  # type: ignore[arg-type]
    part = channels // 4, 2, channels // 4
    output, kept, keys = ops_combined.tree_conv_silu(inputs, history, weight, bias, window, *part)
    assert torch.equal(keys.flatten(2), output.transpose(1, 2)[..., part[0] : part[0] + 2 * part[2]])
    # One rounding to the dtype behind a few in float32.
    bound = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(output.double(), exact, rtol=bound, atol=bound)
    assert torch.equal(kept.nan_to_num(7), inputs.nan_to_num(7))


@DTYPES
@CONVOLUTIONS
def test_compiled_convolution_writes_what_is_kept_where_it_belongs(
    dtype: torch.dtype, rows: int, nodes: int, channels: int
) -> None:
    inputs, history, weight, bias, window = convolution(rows, nodes, channels, dtype, bias=rows != 16)
    assert inputs is not None and window is not None
    part = channels // 4, 2, channels // 4
    output, _, keys = ops_combined.tree_conv_silu(inputs, history, weight, bias, window, *part)

    def layer(inputs: Tensor, window: Tensor, buffer: Tensor, held: Tensor) -> Tensor:
        y, kept, keys = ops_combined.tree_conv_silu(inputs, history, weight, bias, window, *part)
        buffer.copy_(kept)
        held.copy_(keys)
        return y

    buffer = torch.zeros(rows, nodes, channels, device="cuda", dtype=dtype).transpose(1, 2)
    held = torch.zeros_like(keys)
    with torch.no_grad():
        again = torch.compile(layer, fullgraph=True, dynamic=False)(inputs, window, buffer, held)
    assert torch.equal(held, keys)
    assert torch.equal(again, output) and torch.equal(buffer.nan_to_num(7), inputs.nan_to_num(7))


HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
PRODUCTS = pytest.mark.parametrize(
    ("rows", "size", "columns"), [(640, 2560, 32), (40, 1024, 16), (1, 300, 64), (2048, 4096, 5)]
)


def check_products(found: tuple[Tensor, ...], x: Tensor, weights: tuple[Tensor, ...]) -> None:
    for product, weight in zip(found, weights, strict=True):
        # The best that a result of this type can be. The library's own product would be no better a measure, and a tool that
        # watches kernels for races cannot run it.
        exact = x.double() @ weight.double().T
        rounding = float((exact.to(x.dtype).double() - exact).norm())
        assert float((product.double() - exact).norm()) <= 1.1 * rounding


@HALVES
@PRODUCTS
def test_narrow_products_are_exact_but_for_rounding(dtype: torch.dtype, rows: int, size: int, columns: int) -> None:
    x, left, right = (torch.randn(n, size, device="cuda").to(dtype) for n in (rows, columns, 7))
    check_products(ops_combined.narrow_products(x, left.T, right.T), x, (left, right))


@HALVES
@PRODUCTS
def test_compiled_narrow_products_are_exact_but_for_rounding(dtype: torch.dtype, rows: int, size: int, columns: int) -> None:
    x, left, right = (torch.randn(n, size, device="cuda").to(dtype) for n in (rows, columns, 7))
    compiled = torch.compile(lambda *given: ops_combined.narrow_products(*given), fullgraph=True, dynamic=False)
    with torch.no_grad():
        check_products(compiled(x, left.T, right.T), x, (left, right))


@DTYPES
@pytest.mark.parametrize("shape", [(16, 40, 248320), (1, 40, 248320), (3, 5, 1000), (2, 7, 1)])
def test_best_token_is_argmax(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    # Halves have many equals among so many.
    logits = torch.randn(shape, device="cuda").to(dtype)
    logits[0, 0, shape[2] // 2 :] = torch.nan
    logits[0, 1] = -torch.inf
    logits[0, 2, shape[2] // 3] = torch.inf
    assert torch.equal(ops_combined.best_token(logits), logits.argmax(-1))
    transposed = logits.transpose(0, 1)
    assert torch.equal(ops_combined.best_token(transposed), transposed.argmax(-1))


def test_an_activated_convolution_meets_the_plain_one() -> None:
    inputs, history, weight, bias, window = convolution(4, 40, 6144, torch.bfloat16, bias=True)
    plain = torch.nn.functional.silu(ops.tree_causal_conv1d(inputs, history, weight, bias, window))
    output, _, _ = ops_combined.tree_conv_silu(inputs, history, weight, bias, window, 0, 0, 0)
    torch.testing.assert_close(output, plain, rtol=2.0**-6, atol=2.0**-6)
