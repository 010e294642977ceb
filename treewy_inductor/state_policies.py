"""Where a cache keeps recurrent states while a tree is verified, and what it does when a path of it is accepted.

    reconstruct   the committed state, and per node what the accepted state is rebuilt from; one write of the state a commit
    replay        as reconstruct, but accepted nodes wait in a trunk; one write of the state a full trunk, and where a trunk was
                  measured to cost more than it saves, none and one write a commit
    fused         as replay, but the trunk holds one step: the next verification folds it while it reads the state
    store_all     N full states, one of them the committed one; a commit only notes which

    state           [L, B, HV, K, V] state_dtype, a view of [L, B, HV, V, K]: kernels stream it along K
    node_keys       [L, B, N, HK, K] model dtype       trunk_keys    [L, B, T, HK, K] model dtype
    key_scale       [L, B, N, HK] float32, 1 / |key|   trunk_scale   [L, B, T, HK] float32
    pseudo_values   [L, B, N, HV, V] float32           trunk_values  [L, B, T, HV, V] float32
    path_decay      [L, B, N, HV(, K)] float32         trunk_decay   [L, B, T, HV(, K)] float32
    snapshots       [L, B, N, HV, K, V] state_dtype    trunk_length  [B] int32
    accepted        [B] int32

They are made once per cache; their :meth:`layer` is what one layer of the model reads and writes through markers. All policies
give the same states: the model, the graph around the recurrence and the accepted tokens do not depend on them.

    L layers  B batch  N nodes  T trunk slots  HK key heads  HV value heads  K key dim  V value dim
"""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor.aligned_zeros import aligned_zeros
from treewy_inductor.deferred_states import FusedStates, PromptStates, ReplayStates
from treewy_inductor.layer_shapes import LinearShape, default_flush_every
from treewy_inductor.reconstructed_states import ReconstructStates
from treewy_inductor.reference_store_all import accepted_block, committed_state
from treewy_inductor.state_layers import StoreAllLayer


class StoreAllStates:
    """N states a layer and row: block ``accepted`` holds the committed one until a verification overwrites all of them.

    So a row whose tree was verified has to accept at least its root, the token accepted last: if it commits nothing its
    state is lost, and NaN from then on rather than silently wrong. It has to commit before its state is read, too.
    """

    policy = "store_all"
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
        self.key_heads = shape.key_heads
        states = batch_size, max_nodes, shape.value_heads, shape.value_dim, shape.key_dim
        self.snapshots = aligned_zeros(layers, *states, dtype=state_dtype, device=device).transpose(4, 5)
        self.accepted = torch.zeros(batch_size, dtype=torch.int32, device=device)

    @property
    def state(self) -> Tensor:
        """The committed states of settled rows, ``[L, B, HV, K, V]``, a view of their block 0."""
        return self.snapshots[:, :, 0]

    def tensors(self) -> dict[str, Tensor]:
        """Return every buffer by name."""
        return {"snapshots": self.snapshots, "accepted": self.accepted}

    def layer(self, slot: int) -> StoreAllLayer:
        """Return the part of linear layer ``slot``."""
        return StoreAllLayer(self, slot)

    def commit(self, path: Tensor, parents: Tensor) -> None:
        """Note the last node of each row's path as the block that holds its committed state."""
        self.accepted.copy_(accepted_block(self.accepted, parents, path))

    def settle(self, rows: Tensor | None = None) -> None:
        """Move the committed states of ``rows`` to block 0."""
        index = torch.arange(len(self.accepted), device=self.accepted.device) if rows is None else rows
        for snapshots in self.snapshots:
            snapshots[index, 0] = committed_state(snapshots[index], self.accepted[index])
        self.accepted[index] = 0


POLICIES: dict[str, type[ReconstructStates | StoreAllStates]] = {
    "reconstruct": ReconstructStates,
    "replay": ReplayStates,
    "fused": FusedStates,
    "store_all": StoreAllStates,
}


def make_states(
    policy: str,
    flush_every: int | None,
    shape: LinearShape,
    layers: int,
    batch_size: int,
    max_nodes: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
) -> ReconstructStates | StoreAllStates:
    """Return zeroed states under ``policy``.

    Raises:
        ValueError: for an unknown policy, or a ``flush_every`` that ``policy`` has no use for.
    """
    if policy not in POLICIES:
        raise ValueError(f"mamba_state_commit is {policy!r}: choose one of {', '.join(map(repr, POLICIES))}")
    if flush_every is not None and policy != "replay":
        raise ValueError(f"flush_every is {flush_every} under mamba_state_commit={policy!r}: only 'replay' defers its commits")
    sizes = shape, layers, batch_size, max_nodes, dtype, state_dtype, device
    if policy == "replay":
        slots = default_flush_every(max_nodes, batch_size * shape.value_heads) if flush_every is None else flush_every
        if slots < 1:
            raise ValueError(f"flush_every is {slots}, expected at least 1 token: 1 writes the state with every commit")
        return ReplayStates(*sizes, slots) if slots > 1 else PromptStates(*sizes)
    return POLICIES[policy](*sizes)
