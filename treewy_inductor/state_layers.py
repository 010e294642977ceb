"""What one linear layer of a model reads and writes while its tokens form a tree, under each commit policy.

Both go through markers, functional ops that a pass replaces together with the recurrence between them. The buffers are slices
of those in :mod:`treewy_inductor.state_policies` and never move.

    B batch   N nodes   T trunk slots   HK key heads   HV value heads   K key dim   V value dim
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from treewy_inductor import ops, ops_fused, ops_replay, ops_store_all
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.fixed_tensors import fix

if TYPE_CHECKING:
    from treewy_inductor.deferred_states import FusedStates, ReplayStates
    from treewy_inductor.reconstructed_states import ReconstructStates
    from treewy_inductor.state_policies import StoreAllStates


def _mark_static(layer: object) -> None:
    fix(*(value for value in vars(layer).values() if isinstance(value, Tensor)))


class ReconstructLayer:
    """One layer's part of :class:`ReconstructStates`."""

    def __init__(self, states: ReconstructStates, slot: int) -> None:
        self.state = states.state[slot]
        self.node_keys, self.key_scale = states.node_keys[slot], states.key_scale[slot]
        self.pseudo_values, self.path_decay = states.pseudo_values[slot], states.path_decay[slot]
        _mark_static(self)

    def read(self, tree: TreeEncoding, index: int, slot: int = 0) -> Tensor:
        """Return the state above the root ``[B, HV, K, V]``, marked as where the recurrence of layer ``index`` starts."""
        return ops.state_in(self.state, tree.ancestors, tree.order, tree.internal, tree.height, index, slot)

    def keep(self, final_state: Tensor, index: int, slot: int = 0) -> None:
        """Keep what a commit needs of each node, which a pass puts in place of this marker's results."""
        kept = self.pseudo_values, self.node_keys, self.path_decay, self.key_scale
        for buffer, value in zip(kept, ops.state_out(final_state, *kept, index, slot), strict=True):
            buffer.copy_(value.detach())


class ReplayLayer(ReconstructLayer):
    """One layer's part of :class:`ReplayStates`."""

    def __init__(self, states: ReplayStates, slot: int) -> None:
        self.trunk_keys, self.trunk_scale = states.trunk_keys[slot], states.trunk_scale[slot]
        self.trunk_values, self.trunk_decay = states.trunk_values[slot], states.trunk_decay[slot]
        self.trunk_length = states.trunk_length
        super().__init__(states, slot)

    def read(self, tree: TreeEncoding, index: int, slot: int = 0) -> Tensor:
        """Return the state above the trunk, marked as where trunk and recurrence of layer ``index`` start."""
        trunk = self.trunk_keys, self.trunk_scale, self.trunk_values, self.trunk_decay, self.trunk_length
        return ops_replay.state_in_trunk(
            self.state, tree.ancestors, tree.order, tree.internal, tree.height, *trunk, index, slot
        )


class FusedLayer(ReplayLayer):
    """One layer's part of :class:`FusedStates`; the last layer of a model empties the trunks that all have folded."""

    def __init__(self, states: FusedStates, slot: int) -> None:
        self.is_last = slot == len(states.state) - 1
        super().__init__(states, slot)

    def keep(self, final_state: Tensor, index: int, slot: int = 0) -> None:
        """Keep what a commit needs of each node, and the state into which a pass has the trunk folded."""
        kept = self.pseudo_values, self.node_keys, self.path_decay, self.key_scale, self.state
        for buffer, value in zip(kept, ops_fused.state_out_fused(final_state, *kept, index, slot), strict=True):
            buffer.copy_(value.detach())
        if self.is_last:
            # In the graph, so that a tree that is verified twice is not preceded twice by what was accepted once.
            self.trunk_length.zero_()


class StoreAllLayer:
    """One layer's part of :class:`StoreAllStates`."""

    def __init__(self, states: StoreAllStates, slot: int) -> None:
        self.snapshots, self.accepted, self.key_heads = states.snapshots[slot], states.accepted, states.key_heads
        _mark_static(self)

    @property
    def state(self) -> Tensor:
        """The committed states of settled rows, ``[B, HV, K, V]``."""
        return self.snapshots[:, 0]

    def read(self, tree: TreeEncoding, index: int, slot: int = 0) -> Tensor:
        """Return the committed state ``[B, HV, K, V]``, marked as where the recurrence of layer ``index`` starts."""
        return ops_store_all.state_in_snapshots(self.snapshots, self.accepted, tree.parents, index, slot)

    def keep(self, final_state: Tensor, index: int, slot: int = 0) -> None:
        """Keep every node's state, which a pass puts in place of this marker's result."""
        marked = ops_store_all.state_out_snapshots(final_state, self.snapshots, self.key_heads, index, slot)
        self.snapshots.copy_(marked.detach())
