"""Make the ops of the commit policies ``replay``, ``fused`` and ``store_all`` run our kernels on a GPU, as on_gpu.py does.

What the kernels do not cover (float64, a decay for each channel) runs the op's reference on the same device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from treewy_inductor import (
    compat,
    ops_fused,
    ops_replay,
    ops_store_all,
    reference_fused,
    reference_replay,
    reference_store_all,
)
from treewy_inductor.lowerings.commit_trunk import launch_commit_trunk
from treewy_inductor.lowerings.inductor_launch import INDUCTOR, verify_in_graph
from treewy_inductor.lowerings.launch import EAGER, KERNEL_DTYPES, Launcher, Strided
from treewy_inductor.lowerings.tree_gated_delta import launch_tree_gated_delta
from treewy_inductor.lowerings.tree_gated_delta_fused import launch_tree_gated_delta_fused
from treewy_inductor.lowerings.tree_gated_delta_snapshots import launch_tree_gated_delta_snapshots

_FLOATS, _TREE, _TRUNK = slice(0, 6), slice(6, 10), slice(10, 15)


def _launch_trunk(launcher: Launcher, args: tuple[Any, ...], **into: Any) -> tuple[Strided, ...]:
    return launch_tree_gated_delta(launcher, *args[_FLOATS], *args[_TREE], *args[15:], trunk=args[_TRUNK], **into)


def _tree_gated_delta_trunk(*args: Any) -> Any:
    log_decay = args[3]
    if log_decay.dim() != 3 or any(x.dtype not in KERNEL_DTYPES for x in args[_FLOATS]):
        return reference_replay.tree_gated_delta_trunk(*args)
    return tuple(result.handle for result in _launch_trunk(EAGER, args))


def _lower_tree_gated_delta_trunk(*args: Any) -> Any:
    log_decay, state = args[3], args[5]
    covered = len(log_decay.get_size()) == 3 and all(x.get_dtype() in KERNEL_DTYPES for x in args[_FLOATS])
    if not covered or state.get_device().type != "cuda":
        return compat.call_in_graph(ops_replay.tree_gated_delta_trunk)(*args)
    return verify_in_graph(functools.partial(_launch_trunk, INDUCTOR, args))


def _tree_gated_delta_fused(*args: Any) -> Any:
    if args[3].dim() != 3 or any(x.dtype not in KERNEL_DTYPES for x in args[_FLOATS]):
        return reference_fused.tree_gated_delta_fused(*args)
    return tuple(result.handle for result in launch_tree_gated_delta_fused(EAGER, *args))


def _lower_tree_gated_delta_fused(*args: Any) -> Any:
    log_decay, state = args[3], args[5]
    covered = len(log_decay.get_size()) == 3 and all(x.get_dtype() in KERNEL_DTYPES for x in args[_FLOATS])
    if not covered or state.get_device().type != "cuda":
        return compat.call_in_graph(ops_fused.tree_gated_delta_fused)(*args)
    return verify_in_graph(functools.partial(launch_tree_gated_delta_fused, INDUCTOR, *args))


def _commit_trunk(*args: Tensor) -> None:
    state, path_decay = args[0], args[9]
    if path_decay.dim() == 4 and state.dtype in KERNEL_DTYPES and args[6].dtype in KERNEL_DTYPES:
        launch_commit_trunk(EAGER, *args)
    else:
        reference_replay.commit_trunk(*args)


def _tree_gated_delta_snapshots(*args: Any) -> Any:
    log_decay, snapshots = args[3], args[7]
    if log_decay.dim() != 3 or snapshots.dtype not in KERNEL_DTYPES:
        return reference_store_all.tree_gated_delta_snapshots(*args)
    return launch_tree_gated_delta_snapshots(EAGER, *args).handle


def _lower_tree_gated_delta_snapshots(*args: Any) -> Any:
    log_decay, snapshots = args[3], args[7]
    covered = len(log_decay.get_size()) == 3 and snapshots.get_dtype() in KERNEL_DTYPES
    if not covered or snapshots.get_device().type != "cuda":
        return compat.call_in_graph(ops_store_all.tree_gated_delta_snapshots)(*args)
    return launch_tree_gated_delta_snapshots(INDUCTOR, *args).handle


def register() -> None:
    """Put the kernels behind the ops; called once a process."""
    for name, run in (
        ("tree_gated_delta_trunk", _tree_gated_delta_trunk),
        ("tree_gated_delta_fused", _tree_gated_delta_fused),
        ("commit_trunk", _commit_trunk),
        ("tree_gated_delta_snapshots", _tree_gated_delta_snapshots),
    ):
        torch.library.impl(f"treewy::{name}", "CUDA", run)
    compat.register_lowering(ops_replay.tree_gated_delta_trunk, _lower_tree_gated_delta_trunk)
    compat.register_lowering(ops_fused.tree_gated_delta_fused, _lower_tree_gated_delta_fused)
    compat.register_lowering(ops_store_all.tree_gated_delta_snapshots, _lower_tree_gated_delta_snapshots)
