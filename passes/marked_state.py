"""Pair the markers between which a recurrence lies, and read its sizes from what the cache handed in.

The markers say how the cache commits: one state and what nodes leave (ops.py), the same below a trunk (ops_replay.py) that may
be folded into the state (ops_fused.py), or one state a node (ops_store_all.py).

B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from treewy_inductor import ops, ops_fused, ops_replay, ops_store_all

STATE_IN = (ops.state_in, ops_replay.state_in_trunk, ops_store_all.state_in_snapshots)
STATE_OUT = (ops.state_out, ops_fused.state_out_fused, ops_store_all.state_out_snapshots)
MARKERS = (*STATE_IN, *STATE_OUT, ops.conv_in)


@dataclass(frozen=True)
class MarkedState:
    """One state of one layer between its two markers."""

    state_in: fx.Node
    state_out: fx.Node
    layer: int
    slot: int

    @property
    def final_state(self) -> fx.Node:
        """The state after the last token, as the model computed it."""
        node = self.state_out.args[0]
        assert isinstance(node, fx.Node)
        return node

    @property
    def keeps_states(self) -> bool:
        """Whether the cache keeps one state a node, instead of what the accepted state is rebuilt from."""
        return self.state_out.target is ops_store_all.state_out_snapshots

    @property
    def folds_trunk(self) -> bool:
        """Whether the cache wants the trunk folded into its state."""
        return self.state_out.target is ops_fused.state_out_fused

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """``B, N, HK, HV, K, V``: the state says all but ``N`` and ``HK``, which what the cache keeps says."""
        B, HV, K, V = self.state_in.meta["val"].shape
        kept = self.kept_keys
        if kept is not None:
            N, HK = kept.shape[1:3]
        else:
            N, HK = self.buffers[0].meta["val"].shape[1], int(str(self.state_out.args[2]))
        return B, N, HK, HV, K, V

    @property
    def kept_keys(self) -> Tensor | None:
        """The value of the buffer of the nodes' keys ``[B, N, HK, K]``; none where whole states are kept."""
        return None if self.keeps_states else self.buffer("keys").meta["val"]

    @property
    def buffers(self) -> tuple[fx.Node, ...]:
        """The nodes of all buffers that the cache wants filled from what the nodes of a tree leave."""
        return tuple(node for node in self.state_out.args[1:5] if isinstance(node, fx.Node))

    def buffer(self, name: str) -> fx.Node:
        """Return the node of a buffer that the cache wants filled."""
        return self.buffers[("pseudo_values", "keys", "path_decay", "key_scale").index(name)]

    @property
    def tree(self) -> tuple[fx.Node, ...]:
        """The encoding's ``ancestors, order, internal, height``."""
        return self.state_in.args[1:5]  # type: ignore[return-value]

    @property
    def trunk(self) -> tuple[fx.Node, ...]:
        """Keys, scales, values, decays and length of the trunk below the root; empty without one."""
        return self.state_in.args[5:10] if self.state_in.target is ops_replay.state_in_trunk else ()  # type: ignore[return-value]

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype in which the cache keeps the state."""
        dtype: torch.dtype = self.state_in.meta["val"].dtype
        return dtype


def marked_states(graph: fx.Graph) -> tuple[list[MarkedState], list[fx.Node]]:
    """Return the pairs of markers of a graph in its order, and the markers that have no partner."""
    reads: dict[tuple[Any, Any], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in STATE_IN:
            reads.setdefault(node.args[-2:], []).append(node)
    pairs, alone = [], []
    for node in graph.nodes:
        if node.target not in STATE_OUT:
            continue
        layer, slot = node.args[-2:]
        # A model may look whether a state is there before it takes it; the recurrence starts from what reaches the end.
        found = [each for each in reads.pop((layer, slot), []) if each.users]
        if len(found) == 1:
            pairs.append(MarkedState(found[0], node, int(str(layer)), int(str(slot))))
        else:
            alone += [node, *found]
    for rest in reads.values():
        alone += [each for each in rest if each.users]
    return pairs, alone
