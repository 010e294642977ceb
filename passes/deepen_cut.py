"""Move each role of a proven region towards the graph's inputs, as far as what is skipped is the op's own work.

    before    raw key bf16 [B,N,HK,K] -> repeat heads -> transpose -> to fp32 -> l2norm -> region
    after     raw key bf16 [B,N,HK,K] -> op with norm_eps

What is skipped is run on its own in float64 and must be one of: nothing but a change of layout or an exact cast, heads
repeated for each group, a norm of query and key alike, an exponential of the decay, and for the query alone a scale. Half
precision arithmetic ends the way: the op would compute it more exactly than the model does.

    B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from treewy_inductor.passes.certify import AGREES
from treewy_inductor.passes.evaluate_region import evaluate
from treewy_inductor.passes.find_rounding import rounds
from treewy_inductor.passes.literal_rule import normalized
from treewy_inductor.passes.propose_region import Region
from treewy_inductor.passes.readings import Reading, by_token, heads_of, norm_constants
from treewy_inductor.passes.token_axis import Kind

MAX_STEPS = 64


@dataclass(frozen=True)
class Cut:
    """Where a role is taken from the graph.

    Attributes:
        node: the node to take, of ``heads`` heads, its tokens along ``axis``.
        norm_eps: the norm that the region has after it, negative if none.
        scale: what the region multiplies it with.
        takes_exp: the region takes the exponential of it.
    """

    node: fx.Node
    heads: int
    axis: int
    norm_eps: float = -1.0
    scale: float = 1.0
    takes_exp: bool = False


def deepen(region: Region, reading: Reading, order: dict[fx.Node, int]) -> dict[str, Cut]:
    """Return the deepest provable cut of each role of a proven reading."""
    found = {role: list(_cuts(region, reading, role, node, order)) for role, node in reading.roles.items()}
    cuts = {role: cuts[0] for role, cuts in found.items() if role not in ("query", "key")}
    # Query and key are normalised alike or not at all, and share their heads.
    cuts["query"], cuts["key"] = next(
        (query, key)
        for key in found["key"]
        for query in found["query"]
        if query.norm_eps == key.norm_eps and query.heads == key.heads
    )
    return cuts


def _cuts(region: Region, reading: Reading, role: str, start: fx.Node, order: dict[fx.Node, int]) -> Iterator[Cut]:
    """Yield the cuts of one role, preferred first: laid out as the op wants, then deepest."""
    B, N = region.marked.sizes[:2]
    proven = []
    for depth, (node, skipped) in enumerate(_dominators(region, start, order)):
        heads = heads_of(region, role, node)
        axis = region.labels[node]
        if not heads or not isinstance(axis, int):
            continue
        cut = _prove(region, reading, role, start, node, heads, axis, skipped)
        if cut is not None:
            shape = tuple(node.meta["val"].shape)
            dims = 3 if role in ("decay", "beta") and len(shape) == 3 else 4
            is_plain = len(shape) == dims and shape[:2] == (B, N) and axis == 1 and (dims == 3 or shape[2] == heads)
            proven.append((is_plain, depth, cut))
    yield from (cut for _, _, cut in sorted(proven, key=lambda each: each[:2], reverse=True))


def _dominators(region: Region, start: fx.Node, order: dict[fx.Node, int]) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield the nodes that ``start`` is a function of alone, nearest first, with the nodes in between."""
    open_nodes, skipped = {start}, []
    yield start, []
    for _ in range(MAX_STEPS):
        node = max(open_nodes, key=order.__getitem__)
        sources = node.all_input_nodes
        tokens = [each for each in sources if isinstance(region.labels[each], int)]
        constants = [each for each in sources if region.labels[each] in (Kind.CONSTANT, Kind.INDEX)]
        if rounds(node) or not tokens or len(tokens) + len(constants) < len(sources):
            return
        chain = _free_constants(constants)
        if chain is None:
            return
        open_nodes = (open_nodes - {node}) | set(tokens)
        skipped += [node, *chain]
        if len(open_nodes) == 1:
            (only,) = open_nodes
            yield only, sorted(set(skipped), key=order.__getitem__)


def _free_constants(nodes: list[fx.Node]) -> list[fx.Node] | None:
    found, todo = [], list(nodes)
    while todo:
        node = todo.pop()
        if node.op == "placeholder":
            return None
        found.append(node)
        todo += node.all_input_nodes
    return found


def _prove(
    region: Region,
    reading: Reading,
    role: str,
    start: fx.Node,
    node: fx.Node,
    heads: int,
    axis: int,
    skipped: list[fx.Node],
) -> Cut | None:
    """Run what lies between ``node`` and ``start`` and return the cut if it is the op's own work."""
    if node is start:
        return Cut(node, heads, axis)
    start_heads = heads_of(region, role, start)
    if start_heads % heads:
        return None
    value = node.meta["val"]
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    if role in ("query", "key"):
        # Lengths from 1e-3 to 10, so that the constant of a norm shows.
        drawn *= 10 ** (4 * torch.rand((*value.shape[:-1], 1), generator=generator, dtype=torch.float64) - 3)
    drawn = drawn.to(value.device)
    got = by_token(region, start, evaluate(skipped, {node: drawn}, [start])[start], start_heads)
    given = by_token(region, node, drawn, heads)
    if role in ("query", "key"):
        norms = norm_constants(tuple(skipped)) if reading.norm_eps < 0 else []
        # A root mean square holds the squared norm over K.
        norms += [region.marked.sizes[4] * norm_eps for norm_eps in norms if norm_eps > 0]
        for norm_eps in (-1.0, *norms):
            scale = _fitted_scale(got, normalized(given, norm_eps).repeat_interleave(start_heads // heads, 2))
            is_used = role == "query" and reading.norm_eps < 0
            if scale is not None and (is_used or abs(scale - 1) < 1e-12):
                return Cut(node, heads, axis, norm_eps, scale)
        return None
    if _fitted_scale(got, given) is not None and (got - given).abs().max() == 0:
        return Cut(node, heads, axis)
    if role == "decay" and reading.decay == "itself" and role not in reading.lifts and _fitted_scale(got, given.exp()) == 1:
        return Cut(node, heads, axis, takes_exp=True)
    return None


def _fitted_scale(got: Tensor, expected: Tensor) -> float | None:
    """Return the number by which ``expected`` is multiplied to give ``got``, none if there is no such number."""
    if got.shape != expected.shape:
        return None
    scale = float((got * expected).sum() / expected.square().sum())
    scale = 1.0 if abs(scale - 1) < 1e-12 else scale
    worst = (got - scale * expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-300)
    return scale if float(worst.max()) < AGREES else None
