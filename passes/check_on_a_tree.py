"""Run a rewritten recurrence beside the model's own along paths of a random tree: a check that shares nothing with the proof.

The proof compares roles on a chain in float64. Here both sides run as the graphs have them, in their own dtypes: the new
nodes once on the whole tree, with every layout, cast, scale and norm that was emitted; the model's nodes on each path as an
ordinary sequence, filled up with tokens that change nothing. The state that a commit rebuilds is compared as well.

    B batch   N nodes   HV value heads   K key dim   V value dim
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from treewy_inductor import compat, reference
from treewy_inductor.encoding import derive
from treewy_inductor.passes.certify import by_layout
from treewy_inductor.passes.evaluate_region import evaluate
from treewy_inductor.passes.find_rounding import HALF
from treewy_inductor.passes.recognize_gated_delta import Recurrence
from treewy_inductor.passes.relative_error import relative_error

PATHS = 4
TOLERANCE, HALF_TOLERANCE = 1e-4, 3e-2


def check_on_a_tree(found: Recurrence, output: fx.Node, buffers: Sequence[fx.Node], order: dict[fx.Node, int]) -> str:
    """Compare; return what differs, empty if nothing does.

    Args:
        output: the node that now stands for ``found.output.node``.
        buffers: what now fills pseudo-values, keys, path decays and key scales.
        order: the place of each node in the graph, new ones included.
    """
    with compat.without_fake_tensors():
        return _check(found, output, buffers, order)


def _check(found: Recurrence, output: fx.Node, buffers: Sequence[fx.Node], order: dict[fx.Node, int]) -> str:
    marked = found.marked
    N = marked.sizes[1]
    draw = _draw(found)
    generator = torch.Generator().manual_seed(4)
    state = torch.randn(marked.state_in.meta["val"].shape, generator=generator).to(marked.state_in.meta["val"])
    parents = random_parents(N)
    given = {**draw, **_kept_by_the_cache(found, state, parents)}
    new = evaluate(between(given, [output, *buffers], order), given, [output, *buffers], widen=False)

    final, old_output, layout = marked.final_state, found.output.node, found.output.layout
    tolerance = tolerance_of(new[output].dtype, *(cut.node.meta["val"].dtype for cut in found.cuts.values()))
    old_given = {**draw, marked.state_in: state}
    old_nodes = between(old_given, [old_output, final], order)
    for leaf in some_leaves(parents):
        path = path_to(leaf, parents)
        chain = {node: _along(found, node, draw[node], path) for node in draw}
        old = evaluate(old_nodes, {**chain, marked.state_in: state}, [old_output, final], widen=False)
        on_tree, on_path = (by_layout(marked, value, layout) for value in (new[output], old[old_output]))
        error = relative_error(on_tree[:, path], on_path[:, : len(path)])
        if not error < tolerance:
            return f"on a random tree its output at node {leaf} differs from the model's own along the path by {error:.1e}"
        if found.lifts:
            continue
        error = relative_error(_state_after(found, [new[node] for node in buffers], state, path), old[final])
        if not error < tolerance:
            return f"on a random tree the state rebuilt for node {leaf} differs from the model's own by {error:.1e}"
    return ""


def _kept_by_the_cache(found: Recurrence, state: Tensor, parents: list[int]) -> dict[fx.Node, Tensor]:
    """Return what the marker reads: the state and the tree, in whatever form the cache's way of committing has them."""
    marked = found.marked
    B = state.shape[0]
    links = torch.tensor([parents] * B, dtype=torch.int32, device=state.device)
    sources = [each for each in marked.state_in.args if isinstance(each, fx.Node)]
    if marked.keeps_states:
        snapshots = torch.zeros(sources[0].meta["val"].shape, device=state.device)
        snapshots[:, 0] = state
        return dict(zip(sources, (snapshots, torch.zeros_like(links[:, 0]), links), strict=True))
    ancestors, _, _, slots, internal, height = derive(links, 2)
    # A trunk, where there is one, is empty.
    trunk = [torch.zeros(each.meta["val"].shape).to(each.meta["val"]) for each in marked.trunk]
    return dict(zip(sources, (state, ancestors, slots, internal, height, *trunk), strict=True))


def _state_after(found: Recurrence, buffers: list[Tensor], state: Tensor, path: list[int]) -> Tensor:
    """Return the state that the cache would commit for a path, from what was written into its buffers."""
    if found.marked.keeps_states:
        return buffers[0][:, path[-1]]
    B, N = found.marked.sizes[:2]
    committed = state[None].clone().float()
    accepted = torch.full((B, N), -1, dtype=torch.int32, device=state.device)
    accepted[:, : len(path)] = torch.tensor(path, dtype=torch.int32)
    pseudo_values, keys, path_decay, key_scale = (each[None] for each in buffers[:4])
    reference.commit_state(committed, keys, key_scale, pseudo_values, path_decay, accepted)
    return committed[0]


def _draw(found: Recurrence) -> dict[fx.Node, Tensor]:
    generator = torch.Generator().manual_seed(3)
    draw = {}
    for role, cut in found.cuts.items():
        value = cut.node.meta["val"]
        uniform = torch.rand(value.shape, generator=generator)
        if role == "beta" and "beta" not in found.lifts:
            drawn = uniform
        elif role == "decay" and "decay" not in found.lifts:
            drawn = 1 - 0.5 * uniform if found.decay == "itself" else -0.5 * uniform
        else:
            drawn = torch.randn(value.shape, generator=generator)
            if found.norm_eps < 0 and role in ("query", "key"):
                drawn = drawn / found.marked.sizes[4] ** 0.5
        draw[cut.node] = drawn.to(value)
    return draw


def _along(found: Recurrence, node: fx.Node, value: Tensor, path: list[int]) -> Tensor:
    """Gather a role's tokens along a path and fill up with tokens that neither decay nor write."""
    role, cut = next((role, cut) for role, cut in found.cuts.items() if cut.node is node)
    N = value.shape[cut.axis]
    chain = value.index_select(cut.axis, torch.tensor(path + [0] * (N - len(path)), device=value.device))
    rest = chain.narrow(cut.axis, len(path), N - len(path))
    if role == "beta":
        rest.zero_()
    elif role == "decay":
        rest.fill_(1.0 if found.decay == "itself" else 0.0)
    elif role == "key" and "beta" not in found.cuts:
        rest.zero_()
    return chain


def tolerance_of(*dtypes: torch.dtype) -> float:
    """Return how far two orders of computing in these dtypes may be apart, relative to the whole."""
    return HALF_TOLERANCE if any(dtype in HALF for dtype in dtypes) else TOLERANCE


def between(given: Mapping[fx.Node, Tensor], wanted: Sequence[fx.Node], order: dict[fx.Node, int]) -> list[fx.Node]:
    """Return what ``wanted`` are computed from down from what is given, each after its inputs."""
    seen, todo = set(given), list(wanted)
    nodes = []
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes.append(node)
        todo += node.all_input_nodes
    return sorted(nodes, key=order.__getitem__)


def random_parents(nodes: int) -> list[int]:
    """Draw a tree in which every node hangs from one of the four before it."""
    chance = random.Random(nodes)
    return [-1] + [chance.randrange(max(0, t - 4), t) for t in range(1, nodes)]


def some_leaves(parents: list[int]) -> list[int]:
    """Return the leaves whose paths are compared, the deepest among them."""
    return [t for t in range(len(parents)) if t not in parents][-PATHS:]


def path_to(node: int, parents: list[int]) -> list[int]:
    """Return the nodes from the root to a node."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
