"""The launcher that writes kernels into the graph Inductor is lowering."""

from __future__ import annotations

from collections.abc import Sequence
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
