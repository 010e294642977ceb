"""The launcher that writes kernels into the graph Inductor is lowering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from treewy_inductor import compat
from treewy_inductor.lowerings.launch import Launch, Strided


class InductorLauncher:
    """Takes and makes Inductor's values; a launch becomes a node of its graph, at the place where the op stood."""

    def strided(self, tensor: Any, contiguous: Sequence[int] = ()) -> Strided:
        handle, sizes, strides = compat.realize_strided(tensor, contiguous)
        return Strided(handle, sizes, strides, handle.get_dtype(), handle.get_device().type)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Strided) -> Strided:
        return self.strided(compat.empty_buffer(shape, dtype, like.handle.get_device()))

    def launch(self, launch: Launch) -> None:
        tensors = {name: strided.handle for name, strided in launch.tensors.items()}
        compat.emit_kernel(launch.kernel, launch.grid, tensors, dict(launch.constants), launch.warps, launch.stages)


INDUCTOR = InductorLauncher()


def verify_in_graph(launch: Callable[..., Sequence[Strided]]) -> tuple[Any, ...]:
    """Return what a verification gives: output, pseudo-values, path decays, key scales.

    The last three are written into the buffers that they would be copied to, where the graph allows it: a launch a buffer and
    layer less, and the traffic of the copy.

    Args:
        launch: launches the kernel with the keyword ``into``, see :mod:`treewy_inductor.lowerings.tree_gated_delta`.
    """
    _, *into = compat.destinations(4)
    output, *kept = launch(into=into)
    places = (result.handle if buffer is None else buffer for result, buffer in zip(kept, into, strict=True))
    return output.handle, *places
