"""Compile a small tensor function once for every set of argument shapes, however many there are.

The functions that derive a tree's tensors and accept its nodes run once a step on fixed buffers: compiled they are a few
kernels that a CUDA graph can hold. Dynamo counts recompiles per code object and gives up after eight, which a process that
serves several batch sizes and tree sizes would reach, so each shape gets a code object of its own.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def compile_per_shape(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return ``function`` as a callable that compiles itself anew for each new set of shapes, dtypes and devices.

    Args:
        function: takes tensors and hashable values by position, holds no closure and never reads a tensor's value on the
            host. Called while something else is being compiled, it is traced into that graph.
    """
    compiled: dict[tuple[Any, ...], Callable[..., Result]] = {}

    @functools.wraps(function)
    def call(*args: Any) -> Result:
        if torch.compiler.is_compiling():
            return function(*args)
        key = tuple((a.shape, a.dtype, a.device) if isinstance(a, Tensor) else a for a in args)
        if key not in compiled:
            own = types.FunctionType(
                function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
            )
            compiled[key] = torch.compile(own, fullgraph=True, dynamic=False)
        return compiled[key](*args)

    return call
