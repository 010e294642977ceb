"""One state a layer, rebuilt at every commit (``"reconstruct"``); buffers in :mod:`treewy_inductor.state_policies`."""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor import ops
from treewy_inductor.aligned_zeros import aligned_zeros
from treewy_inductor.layer_shapes import LinearShape
from treewy_inductor.state_layers import ReconstructLayer


class ReconstructStates:
    """One state a layer, rebuilt at every commit from what the accepted nodes left.

    Args:
        shape: of the linear layers.
        layers: how many there are.
        dtype: of keys, the model's.
    """

    policy = "reconstruct"
    flush_every: int | None = None

    def __init__(
        self,
        shape: LinearShape,
        layers: int,
        batch_size: int,
        max_nodes: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        work_dtype = torch.promote_types(state_dtype, torch.float32)
        state = batch_size, shape.value_heads, shape.value_dim, shape.key_dim
        self.state = aligned_zeros(layers, *state, dtype=state_dtype, device=device).transpose(3, 4)
        self.node_keys, self.key_scale, self.pseudo_values, self.path_decay = leavings(
            shape, layers, batch_size, max_nodes, dtype, work_dtype, device
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return every buffer by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def layer(self, slot: int) -> ReconstructLayer:
        """Return the part of linear layer ``slot``."""
        return ReconstructLayer(self, slot)

    def commit(self, path: Tensor, parents: Tensor) -> None:
        """Make the nodes of ``path`` ``[B, P]`` committed tokens of the tree ``parents`` ``[B, N]``, on the device alone."""
        ops.commit_state(self.state, self.node_keys, self.key_scale, self.pseudo_values, self.path_decay, path)

    def settle(self, rows: Tensor | None = None) -> None:
        """Make ``state[:, rows]``, by default of all rows, hold every committed token, so that it may be read or replaced."""


def leavings(
    shape: LinearShape,
    layers: int,
    batch_size: int,
    nodes: int,
    dtype: torch.dtype,
    work_dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return zeroed keys, key scales, pseudo-values and path decays of ``nodes`` nodes a row."""
    decay = (shape.value_heads, shape.key_dim) if shape.decay_per_channel else (shape.value_heads,)

    def zeros(*per_node: int, dtype: torch.dtype = work_dtype) -> Tensor:
        return aligned_zeros(layers, batch_size, nodes, *per_node, dtype=dtype, device=device)

    return (
        zeros(shape.key_heads, shape.key_dim, dtype=dtype),
        zeros(shape.key_heads),
        zeros(shape.value_heads, shape.value_dim),
        zeros(*decay),
    )
