"""A graph as a picture in SVG: layers from the inputs down, each node below all it reads.

The picture is drawn here, not by a browser's script, so that a report opens anywhere and offline. A node's layer is its
longest distance from an input; within a layer, nodes stand in the order of those they read (barycentre sweeps down, up
and down), which is enough for recurrences: long and narrow graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 136, 34, 18, 22, 16
# Beyond this, a picture is longer than anybody scrolls: the listing alone is shown.
MOST_NODES = 420
# A wider picture keeps its size and scrolls, a narrower one shrinks to the page.
FITS_PAGE = 1500


@dataclass(frozen=True)
class GraphNode:
    """One node of a graph, as text.

    Attributes:
        name: as the compiler named it, unique in its graph.
        op: what it does, such as ``aten.mul.Tensor``; ``input`` for what the region takes.
        inputs: names of the nodes it reads.
        shape: as in ``f32[2, 7, 4]``; empty if it is no tensor.
        source: ``file:line`` in the user's code; empty if unknown.
        code: the text of that line.
        role: ``query``, ``state`` ... if the node was proven to play one, else empty.
    """

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    shape: str = ""
    source: str = ""
    code: str = ""
    role: str = ""


def draw(nodes: Sequence[GraphNode]) -> str:
    """Return the picture of ``nodes`` (each after those it reads) as an ``<svg>`` element, empty if there are too many."""
    if not nodes or len(nodes) > MOST_NODES:
        return ""
    layers = _layers(nodes)
    column = _columns(nodes, layers)
    width = MARGIN * 2 + (1 + max(column.values())) * (BOX_WIDTH + GAP_X) - GAP_X
    height = MARGIN * 2 + len(layers) * (BOX_HEIGHT + GAP_Y) - GAP_Y
    corner = {
        name: (MARGIN + column[name] * (BOX_WIDTH + GAP_X), MARGIN + depth * (BOX_HEIGHT + GAP_Y))
        for depth, layer in enumerate(layers)
        for name in layer
    }
    edges = [_edge(corner[source], corner[node.name]) for node in nodes for source in node.inputs if source in corner]
    boxes = [_box(node, corner[node.name]) for node in nodes]
    fits = " fits" if width <= FITS_PAGE else ""
    return (
        f'<svg class="graph{fits}" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="graph of {len(nodes)} nodes">{"".join(edges)}{"".join(boxes)}</svg>'
    )


def _layers(nodes: Sequence[GraphNode]) -> list[list[str]]:
    depth: dict[str, int] = {}
    readers = _readers(nodes)
    for node in nodes:
        depth[node.name] = 1 + max((depth[source] for source in node.inputs if source in depth), default=-1)
    # A node read no less often than it reads sinks to its readers: a slice of a token stands at that token's step.
    for node in reversed(nodes):
        below = readers[node.name]
        if below and len(below) >= len(node.inputs):
            depth[node.name] = min(depth[reader] for reader in below) - 1
    layers: dict[int, list[str]] = {}
    for node in nodes:
        layers.setdefault(depth[node.name], []).append(node.name)
    return [layers[place] for place in sorted(layers)]


def _columns(nodes: Sequence[GraphNode], layers: list[list[str]]) -> dict[str, float]:
    """Return each node's column: layers are ordered by the mean column of neighbours and centred below one another."""
    reads = {node.name: list(node.inputs) for node in nodes}
    readers = _readers(nodes)
    column: dict[str, float] = {}
    for layer in layers:
        _centre(layer, column)
    for sweep, neighbours in ((layers, reads), (layers[::-1], readers), (layers, reads)):
        for layer in sweep:
            wanted = {}
            for name in layer:
                places = [column[other] for other in neighbours[name] if other in column]
                wanted[name] = sum(places) / len(places) if places else column[name]
            layer.sort(key=wanted.__getitem__)
            _centre(layer, column)
    left = min(column.values())
    return {name: place - left for name, place in column.items()}


def _readers(nodes: Sequence[GraphNode]) -> dict[str, list[str]]:
    readers: dict[str, list[str]] = {node.name: [] for node in nodes}
    for node in nodes:
        for source in dict.fromkeys(node.inputs):
            if source in readers:
                readers[source].append(node.name)
    return readers


def _centre(layer: list[str], column: dict[str, float]) -> None:
    for place, name in enumerate(layer):
        column[name] = place - (len(layer) - 1) / 2


def _edge(source: tuple[float, float], target: tuple[float, float]) -> str:
    x0, y0 = source[0] + BOX_WIDTH / 2, source[1] + BOX_HEIGHT
    x1, y1 = target[0] + BOX_WIDTH / 2, target[1]
    bend = max((y1 - y0) / 2, GAP_Y / 2)
    return f'<path class="edge" d="M{x0:.0f} {y0:.0f}C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"/>'


def _box(node: GraphNode, corner: tuple[float, float]) -> str:
    x, y = corner
    kind = f"role-{node.role}" if node.role else "treewy" if node.op.startswith("treewy") else "plain"
    hover = "\n".join(filter(None, (f"{node.name} = {node.op}", node.shape, node.source, node.code)))
    title = node.role or _short(node.op)
    detail = node.name if node.role else node.shape
    middle = x + BOX_WIDTH / 2
    return (
        f'<g class="box {kind}"><title>{escape(hover)}</title>'
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"/>'
        f'<text x="{middle:.0f}" y="{y + 14:.0f}">{escape(_fit(title))}</text>'
        f'<text class="detail" x="{middle:.0f}" y="{y + 27:.0f}">{escape(_fit(detail))}</text></g>'
    )


def _short(op: str) -> str:
    parts = op.split(".")
    return parts[1] if len(parts) > 1 and parts[0] in ("aten", "prims", "higher_order", "treewy") else op


def _fit(text: str, room: int = 19) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"
