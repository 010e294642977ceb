"""One description of a kernel launch for both worlds: eager tensors, and Inductor's nodes while it lowers a graph.

A host wrapper describes its tensors as :class:`Strided`, allocates results through a :class:`Launcher` and hands it
:class:`Launch` records. It never sees which world it is in, so that compiled and eager code run the same kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

# Of the float tensors that a kernel takes.
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Strided(NamedTuple):
    """What a kernel needs to know of a tensor; ``handle`` is the tensor itself in its own world."""

    handle: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True)
class Launch:
    """``kernel`` on ``grid`` programs; ``constants`` are strides, sizes and constexprs by parameter name.

    ``registers`` limits those of a thread.
    """

    kernel: Any
    grid: int
    tensors: Mapping[str, Strided]
    constants: Mapping[str, Any]
    warps: int
    stages: int = field(default=1)
    registers: int | None = field(default=None)


class Launcher(Protocol):
    """A world in which kernels run."""

    def strided(self, tensor: Any, contiguous: Sequence[int] = ()) -> Strided:
        """Return ``tensor`` described; copied first if none of the dimensions ``contiguous`` has stride 1."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Strided) -> Strided:
        """Return a new contiguous tensor on the device of ``like``."""

    def launch(self, launch: Launch) -> None:
        """Run it, or write it into the graph."""


class EagerLauncher:
    """Runs kernels at once, on a GPU or in Triton's interpreter."""

    def strided(self, tensor: Tensor, contiguous: Sequence[int] = ()) -> Strided:
        if contiguous and all(tensor.stride(dim) != 1 and tensor.shape[dim] != 1 for dim in contiguous):
            tensor = tensor.contiguous()
        return Strided(tensor, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Strided) -> Strided:
        return self.strided(torch.empty(tuple(shape), dtype=dtype, device=like.handle.device))

    def launch(self, launch: Launch) -> None:
        if launch.grid == 0:
            return
        tensors = {name: strided.handle for name, strided in launch.tensors.items()}
        options = {} if launch.registers is None else {"maxnreg": launch.registers}
        launch.kernel[(launch.grid,)](
            **tensors, **launch.constants, num_warps=launch.warps, num_stages=launch.stages, **options
        )


EAGER = EagerLauncher()


def strides(name: str, strided: Strided, letters: str) -> dict[str, int]:
    """Return ``{name_letter: stride}`` of the leading dimensions, as the kernels name them."""
    return {f"{name}_{letter}": stride for letter, stride in zip(letters, strided.stride, strict=False)}


def block(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least ``size`` and ``least``: Triton's tiles have no other sizes."""
    return max(least, triton.next_power_of_2(size))


def precisions(raw: Sequence[Strided]) -> tuple[str, str]:
    """Return how to multiply raw inputs, and how to multiply float32 with float32, on the device that holds them.

    bfloat16 inputs are multiplied as they are; the bits of float16 and float32 ones need more terms than bfloat16 has rate for.
    The interpreter multiplies bfloat16 wrongly and AMD's compiler has no tf32.
    """
    if raw[0].device_type == "cpu":
        return "ieee", "ieee"
    exact = "ieee" if torch.version.hip else "tf32x3"
    is_bfloat16 = all(strided.dtype == torch.bfloat16 for strided in raw)
    return "bf16x3" if is_bfloat16 else exact, exact
