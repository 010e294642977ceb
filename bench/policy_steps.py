"""The recurrent part of a decoding step, without a model: verify in every layer, then commit, under each commit policy.

    L linear layers   B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim

Queries, keys, values and gates are random, as wide as the model's; the states are those that the ops themselves make, step by
step. Accepted paths differ from row to row and from step to step, so rows fill and fold their trunks at different times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treewy_inductor import ops_store_all, reference
from treewy_inductor.deferred_states import FusedStates, ReplayStates
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.layer_shapes import LinearShape
from treewy_inductor.lowerings.launch import EAGER
from treewy_inductor.lowerings.tree_gated_delta import launch_tree_gated_delta
from treewy_inductor.lowerings.tree_gated_delta_fused import launch_tree_gated_delta_fused
from treewy_inductor.reconstructed_states import ReconstructStates
from treewy_inductor.state_policies import StoreAllStates, make_states
from treewy_inductor.tree import DraftTree

NORM_EPS = 1e-6


def random_paths(tree: DraftTree, batch: int, count: int, mean_tokens: float, seed: int = 0) -> Tensor:
    """Return accepted paths ``[count, batch, deepest]`` int32 of ``mean_tokens`` nodes in the mean, padded with -1.

    A path goes on from a node to a random child with one probability, the same at all depths, that gives this mean.
    """
    generator = torch.Generator().manual_seed(seed)
    children: dict[int, list[int]] = {}
    depth = [0] * len(tree.parents)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            children.setdefault(parent, []).append(node)
            depth[node] = depth[parent] + 1
    deepest = max(depth) + 1
    low, high = 0.0, 1.0
    for _ in range(40):
        chance = (low + high) / 2
        mean = sum(chance**level for level in range(deepest))
        low, high = (chance, high) if mean < mean_tokens else (low, chance)
    paths = torch.full((count, batch, deepest), -1, dtype=torch.int32)
    draws = torch.rand(count, batch, deepest, 2, generator=generator).tolist()
    for step in range(count):
        for row in range(batch):
            node, length = 0, 0
            while True:
                paths[step, row, length] = node
                length += 1
                goes_on, which = draws[step][row][length - 1]
                if node not in children or goes_on >= chance:
                    break
                node = children[node][int(which * len(children[node]))]
    return paths


@dataclass
class PolicyStep:
    """One step's buffers under one policy. ``inputs`` holds query, key, value, log_decay and beta of each layer."""

    states: ReconstructStates | StoreAllStates
    encoding: TreeEncoding
    inputs: Sequence[Sequence[Tensor]]
    path: Tensor
    outputs: list[Tensor]

    def run(self) -> None:
        """Verify all layers and commit ``path``; nothing is read on the host."""
        self.outputs.clear()
        for slot, inputs in enumerate(self.inputs):
            self.outputs.append(self._verify(slot, inputs))
        if isinstance(self.states, FusedStates):
            self.states.trunk_length.zero_()
        self.commit()

    def commit(self) -> None:
        """Commit ``path`` in all layers."""
        self.states.commit(self.path, self.encoding.parents)

    def _verify(self, slot: int, inputs: Sequence[Tensor]) -> Tensor:
        key, states, tree = inputs[1], self.states, self.encoding
        rest = (key.shape[-1] ** -0.5, NORM_EPS, key.dtype)
        if isinstance(states, StoreAllStates):
            return ops_store_all.tree_gated_delta_snapshots(
                *inputs, tree.parents, states.accepted, states.snapshots[slot], *rest
            )
        trunk = None
        if isinstance(states, ReplayStates):
            trunk = (
                states.trunk_keys[slot],
                states.trunk_scale[slot],
                states.trunk_values[slot],
                states.trunk_decay[slot],
                states.trunk_length,
            )
        # As a compiled step does: results go where they are kept, and a layer before it has left the keys there.
        states.node_keys[slot].copy_(key)
        into = states.pseudo_values[slot], states.path_decay[slot], states.key_scale[slot]
        arguments = *inputs, states.state[slot], tree.ancestors, tree.order, tree.internal, tree.height
        if isinstance(states, FusedStates):
            assert trunk is not None
            results = launch_tree_gated_delta_fused(EAGER, *arguments, *trunk, *rest, into=into)
        else:
            results = launch_tree_gated_delta(EAGER, *arguments, *rest, trunk=trunk, into=into)
        output: Tensor = results[0].handle
        return output


def policy_step(
    policy: str,
    flush_every: int | None,
    shape: LinearShape,
    tree: DraftTree,
    layers: int,
    batch: int,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    distinct: int = 8,
) -> PolicyStep:
    """Return a step of ``layers`` layers on the GPU; ``distinct`` layers have inputs of their own, the others share them."""
    nodes, device = len(tree.parents), torch.device("cuda")
    states = make_states(policy, flush_every, shape, layers, batch, nodes, dtype, state_dtype, device)
    encoding = TreeEncoding(batch, nodes, device=device, compiled=False)
    encoding.fill(tree.padded(nodes).expand(batch, -1).to(device))
    torch.manual_seed(0)
    widths = (shape.key_heads * shape.key_dim, shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim)
    pool = []
    for _ in range(min(distinct, layers)):
        q, k, v = torch.randn(batch, nodes, sum(widths), device=device, dtype=dtype).split(widths, -1)
        heads = (shape.key_heads, -1), (shape.key_heads, -1), (shape.value_heads, -1)
        log_decay = -0.1 * torch.rand(batch, nodes, shape.value_heads, device=device)
        beta = torch.rand(batch, nodes, shape.value_heads, device=device, dtype=dtype)
        pool.append([*(x.unflatten(-1, head) for x, head in zip((q, k, v), heads, strict=True)), log_decay, beta])
    path = torch.full((batch, nodes), -1, dtype=torch.int32, device=device)
    return PolicyStep(states, encoding, [pool[slot % len(pool)] for slot in range(layers)], path, [])


def set_path(step: PolicyStep, paths: Tensor) -> None:
    """Accept ``paths`` ``[B, P]`` in the next step."""
    step.path.fill_(-1)
    step.path[:, : paths.shape[1]].copy_(paths, non_blocking=True)


def scatter_trunks(states: ReconstructStates | StoreAllStates, seed: int = 0) -> None:
    """Let every row's trunk, if there are any, be filled to a place of its own, so that rows do not fold at the same step."""
    if isinstance(states, ReplayStates):
        generator = torch.Generator().manual_seed(seed)
        length = states.trunk_length
        length.copy_(torch.randint(0, states.trunk_keys.shape[2] + 1, length.shape, generator=generator, dtype=torch.int32))


@torch.no_grad()
def worst_errors(
    policy: str, flush_every: int | None, shape: LinearShape, tree: DraftTree, steps: int = 12
) -> tuple[float, float]:
    """Return the relative errors of outputs and committed states after ``steps`` steps, against the reference in float64."""
    step = policy_step(policy, flush_every, shape, tree, layers=2, batch=3)
    exact = torch.zeros(2, 3, shape.value_heads, shape.key_dim, shape.value_dim, dtype=torch.float64, device="cuda")
    output_error = 0.0
    tree_of = step.encoding
    for paths in random_paths(tree, 3, steps, 2.5):
        set_path(step, paths)
        step.run()
        for slot, inputs in enumerate(step.inputs):
            wide = [x.double() for x in inputs]
            expected, u, g, k_scale = reference.tree_gated_delta(
                *wide,
                exact[slot],
                *(tree_of.ancestors, tree_of.order, tree_of.internal, tree_of.height),
                shape.key_dim**-0.5,
                NORM_EPS,
                torch.float64,
            )
            difference = float((step.outputs[slot].double() - expected).norm() / expected.norm())
            output_error = max(output_error, difference if difference == difference else float("inf"))
            one = slice(slot, slot + 1)
            reference.commit_state(exact[one], wide[1][None], k_scale[None], u[None], g[None], step.path)
    step.states.settle()
    state_error = float((step.states.state.double() - exact).norm() / exact.norm())
    return output_error, state_error if state_error == state_error else float("inf")
