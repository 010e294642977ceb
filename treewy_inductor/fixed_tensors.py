"""Tensors that keep their place and their sizes for as long as they live: what a graph over a cache is compiled for."""

from __future__ import annotations

import torch
from torch import Tensor


def fix(*tensors: Tensor) -> None:
    """Let Dynamo rely on it: CUDA graphs write such tensors in place, and their sizes are numbers in any graph.

    Without it a second cache of another size would be traced with symbolic sizes, which no proof can be run on.
    """
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)
        for each in (tensor, tensor._base):
            if each is not None:
                torch._dynamo.mark_static(each)
