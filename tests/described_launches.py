"""What the host wrappers would launch for a shape, laid out as a model and a TreeCache do, and which configuration that is.

Two launches of one configuration are one piece of machine code, but for how far apart rows lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget

from bench.kernel_cases import Shape
from tests.offline_compile import Recorder, described
from treewy_inductor.lowerings import tree_gated_delta
from treewy_inductor.lowerings.commit_state import launch_commit_state
from treewy_inductor.lowerings.commit_trunk import launch_commit_trunk
from treewy_inductor.lowerings.launch import Launch, Strided
from treewy_inductor.lowerings.tensor_memory import keeps_products_apart
from treewy_inductor.lowerings.tree_gated_delta import launch_tree_gated_delta
from treewy_inductor.lowerings.tree_gated_delta_fused import launch_tree_gated_delta_fused

# Constants that stand for numbers and addresses, not for a way to compute.
NUMBERS = ("SCALE", "NORM_EPS", "HK", "GROUPS")


@contextmanager
def planned_for(target: GPUTarget) -> Iterator[None]:
    """Plan launches as where the NVIDIA GPU ``target`` is, by what the Triton that is here makes of its tensor memory."""
    lack = target.arch >= 100 and keeps_products_apart(target.arch)
    with mock.patch.object(tree_gated_delta, "loops_lack_tensor_memory", lambda: lack):
        yield


def floats(*shape: int, dtype: torch.dtype = torch.float32, stride: Sequence[int] | None = None) -> Strided:
    return described(shape, dtype, stride)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Strided:
    return described(shape, dtype)


def trunk_of(slots: int, shape: Shape, *leading: int) -> list[Strided]:
    """Return keys, scales, values, decays and length of a trunk; ``leading`` is layers, if any, then rows."""
    keys = floats(*leading, slots, shape.HK, shape.K, dtype=shape.dtype)
    scale, values = floats(*leading, slots, shape.HK), floats(*leading, slots, shape.HV, shape.V)
    return [keys, scale, values, floats(*leading, slots, shape.HV), ints(leading[-1])]


def rule_arguments(N: int, shape: Shape, B: int) -> list[Strided]:
    """Return query, key and value as views of one projection, log decay, beta, state with keys innermost, and the trees."""
    HK, HV, K, V, dtype = shape.HK, shape.HV, shape.K, shape.V, shape.dtype
    row = 2 * HK * K + HV * V
    heads = [floats(B, N, H, dim, dtype=dtype, stride=(N * row, row, dim, 1)) for H, dim in ((HK, K), (HK, K), (HV, V))]
    state = floats(B, HV, K, V, dtype=shape.state_dtype, stride=(HV * K * V, K * V, 1, K))
    trees = [ints(B, N, -(-N // 64), dtype=torch.int64), ints(B, N), ints(B), ints(B)]
    return [*heads, floats(B, N, HV), floats(B, N, HV, dtype=dtype), state, *trees]


def verify_launches(N: int, shape: Shape, slots: int = 0, B: int = 8, **more: Any) -> list[Launch]:
    """Return the launches of a verification of ``N`` nodes, with a trunk of ``slots`` if there are any."""
    recorder = Recorder()
    more["trunk"] = tuple(trunk_of(slots, shape, B)) if slots else None
    launch_tree_gated_delta(recorder, *rule_arguments(N, shape, B), shape.K**-0.5, 1e-6, shape.dtype, **more)
    return recorder.launches


def fused_launches(N: int, shape: Shape, slots: int, B: int = 8, **more: Any) -> list[Launch]:
    """Return the launches of a verification of ``N`` nodes that folds a trunk of ``slots``."""
    recorder, arguments = Recorder(), [*rule_arguments(N, shape, B), *trunk_of(slots, shape, B)]
    launch_tree_gated_delta_fused(recorder, *arguments, shape.K**-0.5, 1e-6, shape.dtype, **more)
    return recorder.launches


def committed(N: int, shape: Shape, L: int, B: int) -> tuple[Strided, list[Strided]]:
    """Return the stacked states of ``L`` layers; keys, scales, values and decays of ``N`` nodes, and a path."""
    HV, K, V = shape.HV, shape.K, shape.V
    state = floats(L, B, HV, K, V, dtype=shape.state_dtype, stride=(B * HV * K * V, HV * K * V, K * V, 1, K))
    return state, [*trunk_of(N, shape, L, B)[:4], ints(B, N)]


def commit_state_launches(N: int, shape: Shape, L: int = 4, B: int = 8) -> list[Launch]:
    """Return the launches of a commit of a path of at most ``N`` nodes in ``L`` layers."""
    recorder = Recorder()
    state, nodes = committed(N, shape, L, B)
    launch_commit_state(recorder, state, *nodes)
    return recorder.launches


def commit_trunk_launches(N: int, shape: Shape, slots: int, L: int = 4, B: int = 8) -> list[Launch]:
    """Return the launches of a commit of a path of at most ``N`` nodes into a trunk of ``slots``."""
    recorder = Recorder()
    state, nodes = committed(N, shape, L, B)
    launch_commit_trunk(recorder, state, *trunk_of(slots, shape, L, B), *nodes)
    return recorder.launches


def configuration(launch: Launch) -> tuple[Any, ...]:
    """Return what tells a launch's machine code from others': kernel, options, types and constants, and kinds of integers."""
    kinds: dict[str, Any] = {name: strided.dtype for name, strided in launch.tensors.items()}
    for parameter in launch.kernel.params:
        value = launch.constants.get(parameter.name)
        if parameter.name in NUMBERS or value is None:
            continue
        if parameter.name.isupper() and parameter.is_constexpr:
            kinds[parameter.name] = value
        elif parameter.name.isupper():
            # Triton compiles anew for an integer that is 1, and for one that 16 divides.
            kinds[parameter.name] = "1" if value == 1 else "16 divides" if value % 16 == 0 else "any"
    options = (launch.kernel.fn.__name__, launch.warps, launch.stages, launch.registers)
    return options, tuple(sorted(kinds.items(), key=lambda item: item[0]))
