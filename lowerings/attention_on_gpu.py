"""Make treewy::tree_attention run our kernel on a GPU, as on_gpu.py does for the other ops.

float64 and heads too wide for a multiprocessor's shared memory run the op's reference on the same device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treewy_inductor import compat, ops_attention, reference_attention
from treewy_inductor.lowerings.inductor_launch import INDUCTOR
from treewy_inductor.lowerings.launch import EAGER, KERNEL_DTYPES
from treewy_inductor.lowerings.tree_attention import launch_tree_attention

_WIDEST_HEAD = 256


def has_attention_kernel(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether the kernel covers heads of these dims."""
    return dtype in KERNEL_DTYPES and max(key_dim, value_dim) <= _WIDEST_HEAD


def _tree_attention(query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
    if not has_attention_kernel(query.dtype, query.shape[3], values.shape[3]):
        return reference_attention.tree_attention(query, keys, values, *rest)
    return launch_tree_attention(EAGER, query, keys, values, *rest).handle


def _lower_tree_attention(query: Any, keys: Any, values: Any, *rest: Any) -> Any:
    dims = int(query.get_size()[3]), int(values.get_size()[3])
    if query.get_device().type != "cuda" or not has_attention_kernel(query.get_dtype(), *dims):
        return compat.call_in_graph(ops_attention.tree_attention)(query, keys, values, *rest)
    return launch_tree_attention(INDUCTOR, query, keys, values, *rest).handle


def register() -> None:
    """Put the kernel behind the op; called once a process."""
    torch.library.impl("treewy::tree_attention", "CUDA", _tree_attention)
    compat.register_lowering(ops_attention.tree_attention, _lower_tree_attention)
