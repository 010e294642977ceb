"""Make the combined ops run our kernels on a GPU, as on_gpu.py does for the other ops; float64 runs their reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treewy_inductor import compat, ops_combined
from treewy_inductor.lowerings.best_token import launch_best_token
from treewy_inductor.lowerings.inductor_launch import INDUCTOR
from treewy_inductor.lowerings.launch import EAGER, KERNEL_DTYPES
from treewy_inductor.lowerings.narrow_products import launch_narrow_products
from treewy_inductor.lowerings.tree_conv_silu import MOST_TAPS, launch_tree_conv_silu

_HALF_DTYPES = (torch.bfloat16, torch.float16)


def _has_convolution_kernel(dtypes: list[torch.dtype], taps: int) -> bool:
    return all(dtype in KERNEL_DTYPES for dtype in dtypes) and taps <= MOST_TAPS


def _tree_conv_silu(inputs: Tensor, history: Tensor, weight: Tensor, *rest: Any) -> Any:
    if not _has_convolution_kernel([inputs.dtype, weight.dtype], weight.shape[1]):
        return ops_combined.convolve_and_activate(inputs, history, weight, *rest)
    output, kept, part = launch_tree_conv_silu(EAGER, inputs, history, weight, *rest)
    return output.handle.transpose(1, 2), kept.handle.transpose(1, 2), part.handle


def _narrow_products(x: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype not in _HALF_DTYPES:
        return ops_combined.multiply_both(x, left, right)
    both = launch_narrow_products(EAGER, x, left, right).handle.sum(0).to(x.dtype)
    return both[:, : left.shape[1]].contiguous(), both[:, left.shape[1] :].contiguous()


def _best_token(logits: Tensor) -> Tensor:
    if logits.dtype not in KERNEL_DTYPES or not logits.is_contiguous() or logits.shape[-1] >= 2**30:
        return ops_combined.most_likely(logits)
    return launch_best_token(EAGER, logits).handle


def _lower_tree_conv_silu(inputs: Any, history: Any, weight: Any, *rest: Any) -> Any:
    covered = _has_convolution_kernel([inputs.get_dtype(), weight.get_dtype()], int(weight.get_size()[1]))
    if not covered or inputs.get_device().type != "cuda":
        return compat.call_in_graph(ops_combined.tree_conv_silu)(inputs, history, weight, *rest)
    _, *into = compat.destinations(3)
    output, kept, part = launch_tree_conv_silu(INDUCTOR, inputs, history, weight, *rest, into=(into[0], into[1]))
    y, own = (compat.permute_in_graph(each.handle, (0, 2, 1)) for each in (output, kept))
    return y, own if into[0] is None else into[0], part.handle if into[1] is None else into[1]


def _lower_narrow_products(x: Any, left: Any, right: Any) -> Any:
    """Return both products as elementwise loops that add up the parts, which Inductor fuses with what reads them."""
    if x.get_dtype() not in _HALF_DTYPES or x.get_device().type != "cuda":
        return compat.call_in_graph(ops_combined.narrow_products)(x, left, right)
    partial = launch_narrow_products(INDUCTOR, x, left, right)
    splits, rows, _ = partial.shape
    load = partial.handle.make_loader()
    widths = [int(weight.get_size()[1]) for weight in (left, right)]

    def product(first: int, width: int) -> Any:
        def element(op: Any, index: Any) -> Any:
            m, n = index
            total = load([0, m, n + first])
            for part in range(1, splits):
                total = op.add(total, load([part, m, n + first]))
            return op.to_dtype(total, x.get_dtype())

        return compat.pointwise_in_graph(partial.handle, x.get_dtype(), (rows, width), element)

    return product(0, widths[0]), product(widths[0], widths[1])


def register() -> None:
    """Put the kernels behind the ops; called once a process."""
    for name, run in (("tree_conv_silu", _tree_conv_silu), ("narrow_products", _narrow_products), ("best_token", _best_token)):
        torch.library.impl(f"treewy::{name}", "CUDA", run)
    compat.register_lowering(ops_combined.tree_conv_silu, _lower_tree_conv_silu)
    compat.register_lowering(ops_combined.narrow_products, _lower_narrow_products)
