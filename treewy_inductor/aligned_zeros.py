"""Zeroed tensors of several layers whose every layer begins at a multiple of 16 bytes.

Compiled code copies an input that begins anywhere else, one that it overwrites twice, and CUDA graphs of Inductor then refuse
to overwrite it. 39 nodes of two float32 scales are 312 bytes, so the second layer of such a tensor would begin in between.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from treewy_inductor.layer_shapes import LAYER_ALIGNMENT


def aligned_zeros(layers: int, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros ``[layers, *shape]``; each layer is contiguous, the layers may have up to 15 bytes between them."""
    size = math.prod(shape)
    step = -(-size * dtype.itemsize // LAYER_ALIGNMENT) * LAYER_ALIGNMENT // dtype.itemsize
    return torch.zeros((layers, step), dtype=dtype, device=device)[:, :size].unflatten(1, shape)
