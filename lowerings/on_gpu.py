"""Make the ops run our kernels on a GPU: eager calls by dispatch, compiled ones by Inductor lowerings.

One kernel source serves both. What the kernels do not cover (float64, a decay for each channel) runs the op's reference on
the same device, which is plain PyTorch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from treewy_inductor import compat, ops, reference
from treewy_inductor.lowerings import attention_on_gpu, combined_on_gpu, policies_on_gpu
from treewy_inductor.lowerings.commit_conv import launch_commit_conv
from treewy_inductor.lowerings.commit_keys_values import launch_commit_keys_values
from treewy_inductor.lowerings.commit_state import launch_commit_state
from treewy_inductor.lowerings.inductor_launch import INDUCTOR, verify_in_graph
from treewy_inductor.lowerings.launch import EAGER, KERNEL_DTYPES
from treewy_inductor.lowerings.tree_gated_delta import launch_tree_gated_delta


def has_tree_kernel(dtypes: list[torch.dtype], decay_dims: int) -> bool:
    """Whether the tree kernels cover these float inputs and a decay of ``[B, N, HV]`` (3 dims) or ``[B, N, HV, K]`` (4)."""
    return decay_dims == 3 and all(dtype in KERNEL_DTYPES for dtype in dtypes)


def _tree_gated_delta(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, *rest: Any
) -> Any:
    floats = (query, key, value, log_decay, beta, state)
    if not has_tree_kernel([x.dtype for x in floats], log_decay.dim()):
        return reference.tree_gated_delta(*floats, *rest)
    return tuple(result.handle for result in launch_tree_gated_delta(EAGER, *floats, *rest))


def _commit_state(
    state: Tensor, keys: Tensor, key_scale: Tensor, pseudo_values: Tensor, path_decay: Tensor, path: Tensor
) -> None:
    tensors = (state, keys, key_scale, pseudo_values, path_decay)
    if has_tree_kernel([x.dtype for x in tensors], path_decay.dim() - 1):
        launch_commit_state(EAGER, *tensors, path)
    else:
        reference.commit_state(*tensors, path)


def _commit_conv(history: Tensor, inputs: Tensor, path: Tensor) -> None:
    launch_commit_conv(EAGER, history, inputs, path)


def _commit_keys_values(keys: Tensor, values: Tensor, lengths: Tensor, path: Tensor) -> None:
    launch_commit_keys_values(EAGER, keys, values, lengths, path)


def _lower_tree_gated_delta(query: Any, key: Any, value: Any, log_decay: Any, beta: Any, state: Any, *rest: Any) -> Any:
    floats = (query, key, value, log_decay, beta, state)
    covered = has_tree_kernel([x.get_dtype() for x in floats], len(log_decay.get_size()))
    if not covered or state.get_device().type != "cuda":
        return compat.call_in_graph(ops.tree_gated_delta)(*floats, *rest)
    return verify_in_graph(functools.partial(launch_tree_gated_delta, INDUCTOR, *floats, *rest))


@functools.cache
def register_once() -> None:
    """Put the kernels behind the ops; what comes after the first call in a process does nothing."""
    for name, run in (
        ("tree_gated_delta", _tree_gated_delta),
        ("commit_state", _commit_state),
        ("commit_conv", _commit_conv),
        ("commit_keys_values", _commit_keys_values),
    ):
        torch.library.impl(f"treewy::{name}", "CUDA", run)
    compat.register_lowering(ops.tree_gated_delta, _lower_tree_gated_delta)
    policies_on_gpu.register()
    attention_on_gpu.register()
    combined_on_gpu.register()
