"""States that a commit does not write yet: what was accepted waits in a trunk (``"replay"``, ``"fused"``).

Buffers in :mod:`treewy_inductor.state_policies`; what a trunk means in :mod:`treewy_inductor.reference_replay`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor import ops, ops_replay
from treewy_inductor.layer_shapes import LinearShape
from treewy_inductor.reconstructed_states import ReconstructStates, leavings
from treewy_inductor.reference_replay import trunk_path
from treewy_inductor.state_layers import FusedLayer, ReplayLayer


class ReplayStates(ReconstructStates):
    """Accepted nodes wait in a trunk of ``flush_every`` tokens; a path that does not fit is folded with it in one write."""

    policy = "replay"

    def __init__(
        self,
        shape: LinearShape,
        layers: int,
        batch_size: int,
        max_nodes: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
        flush_every: int,
    ) -> None:
        super().__init__(shape, layers, batch_size, max_nodes, dtype, state_dtype, device)
        self.flush_every = flush_every
        self.trunk_keys, self.trunk_scale, self.trunk_values, self.trunk_decay = leavings(
            shape, layers, batch_size, flush_every, dtype, self.key_scale.dtype, device
        )
        self.trunk_length = torch.zeros(batch_size, dtype=torch.int32, device=device)

    def layer(self, slot: int) -> ReplayLayer:
        """Return the part of linear layer ``slot``."""
        return ReplayLayer(self, slot)

    def commit(self, path: Tensor, parents: Tensor) -> None:
        """Append each row's path to its trunk, or fold both into the state where the trunk is full."""
        ops_replay.commit_trunk(
            self.state,
            self.trunk_keys,
            self.trunk_scale,
            self.trunk_values,
            self.trunk_decay,
            self.trunk_length,
            self.node_keys,
            self.key_scale,
            self.pseudo_values,
            self.path_decay,
            path,
        )

    def settle(self, rows: Tensor | None = None) -> None:
        """Fold the trunks of ``rows`` into their states; they are empty afterwards."""
        index = slice(None) if rows is None else rows
        folded = torch.zeros_like(self.trunk_length)
        folded[index] = self.trunk_length[index]
        trunk = self.trunk_keys, self.trunk_scale, self.trunk_values, self.trunk_decay
        ops.commit_state(self.state, *trunk, trunk_path(folded, self.trunk_keys.shape[2]))
        self.trunk_length[index] = 0


class FusedStates(ReplayStates):
    """A commit copies what the accepted nodes left; the next verification reads and writes each state once.

    ``settle`` folds what waits where states are read before that.
    """

    policy = "fused"

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
        super().__init__(shape, layers, batch_size, max_nodes, dtype, state_dtype, device, flush_every=max_nodes)
        self.flush_every = None

    def layer(self, slot: int) -> FusedLayer:
        """Return the part of linear layer ``slot``."""
        return FusedLayer(self, slot)


class PromptStates(ReconstructStates):
    """What replay is where no token waits: every commit writes the state, by the same kernels as under reconstruct."""

    policy = "replay"
    flush_every = 1
