"""Pair the markers between which a recurrence lies, and read its sizes from what the cache handed in.

B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treewy_inductor import ops


@dataclass(frozen=True)
class MarkedState:
    """One state of one layer between ``state_in`` and ``state_out``."""

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
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """``B, N, HK, HV, K, V``: the state says all but ``HK``, which the buffer of keys says."""
        B, HV, K, V = self.state_in.meta["val"].shape
        N, HK = self.buffer("keys").meta["val"].shape[1:3]
        return B, N, HK, HV, K, V

    def buffer(self, name: str) -> fx.Node:
        """Return the node of a buffer that the cache wants filled."""
        place = ("final_state", "pseudo_values", "keys", "path_decay", "key_scale").index(name)
        node = self.state_out.args[place]
        assert isinstance(node, fx.Node)
        return node

    @property
    def tree(self) -> tuple[fx.Node, ...]:
        """The encoding's ``ancestors, order, internal, height``."""
        return self.state_in.args[1:5]  # type: ignore[return-value]

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype in which the cache keeps the state."""
        dtype: torch.dtype = self.state_in.meta["val"].dtype
        return dtype


def marked_states(graph: fx.Graph) -> tuple[list[MarkedState], list[fx.Node]]:
    """Return the pairs of markers of a graph in its order, and the markers that have no partner."""
    reads: dict[tuple[Any, Any], list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=ops.state_in):
        reads.setdefault((node.args[5], node.args[6]), []).append(node)
    pairs, alone = [], []
    for node in graph.find_nodes(op="call_function", target=ops.state_out):
        layer, slot = node.args[5], node.args[6]
        # A model may look whether a state is there before it takes it; the recurrence starts from what reaches the end.
        found = [each for each in reads.pop((layer, slot), []) if each.users]
        if len(found) == 1:
            pairs.append(MarkedState(found[0], node, int(str(layer)), int(str(slot))))
        else:
            alone += [node, *found]
    for rest in reads.values():
        alone += [each for each in rest if each.users]
    return pairs, alone
