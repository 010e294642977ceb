"""Draw a draft tree: in text, one node a line, or as a picture with a column for each level."""

from __future__ import annotations

from collections.abc import Sequence

from treewy_inductor.tree import ROOT, DraftTree

ACCEPTED_COLOUR, REJECTED_COLOUR, EDGE_COLOUR = "#2a7f4f", "#d8dce2", "#8a929c"


def node_labels(tree: DraftTree, labels: Sequence[str] | None) -> list[str]:
    """Return what to write at each node, in one line: ``labels`` if given, else its token, else its index."""
    if labels is None:
        return [str(name) for name in (range(len(tree)) if tree.tokens is None else tree.tokens)]
    if len(labels) != len(tree):
        raise ValueError(f"labels has {len(labels)} entries for {len(tree)} nodes: give one a node")
    return [label.replace("\n", "\\n") for label in labels]


def draw_text(tree: DraftTree, labels: Sequence[str] | None = None, accepted: Sequence[int] = ()) -> str:
    """Return the tree in text, children indented below their parent in index order.

    Args:
        labels: what to write at each node; by default its token, or its index in a tree without tokens.
        accepted: nodes marked with a star.
    """
    names, starred = node_labels(tree, labels), set(accepted)
    lines: list[str] = []

    def draw(node: int, first: str, rest: str) -> None:
        lines.append(first + names[node] + (" *" if node in starred else ""))
        children = tree.children(node)
        for child in children:
            is_last = child == children[-1]
            draw(child, rest + ("└─ " if is_last else "├─ "), rest + ("   " if is_last else "│  "))

    for root in tree.children(ROOT):
        draw(root, "", "")
    return "\n".join(lines)


def draw_picture(tree: DraftTree, path: str, labels: Sequence[str] | None = None, accepted: Sequence[int] = ()) -> None:
    """Write the tree to ``path``, in the format its ending names: levels from left to right, accepted nodes filled.

    Args:
        path: a file name ending in .png, .svg or .pdf.
        labels: what to write at each node; by default its token, or its index in a tree without tokens.
        accepted: nodes to mark, as an accepted path.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a picture of a tree needs matplotlib: pip install 'treewy-inductor[picture]', or draw with DraftTree.text"
        ) from error

    names, filled = node_labels(tree, labels), set(accepted)
    height_of = _heights(tree)
    depths, lowest = tree.depths, min(height_of)
    column_inches = 0.6 + 0.085 * max(len(name) for name in names)
    figure = Figure(figsize=(column_inches * (max(depths) + 1), 0.26 * (1.5 - lowest)))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.set_xlim(-0.5, max(depths) + 0.5)
    axes.set_ylim(lowest - 0.75, 0.75)
    for t, parent in enumerate(tree.parents):
        if parent == ROOT:
            continue
        is_accepted = t in filled and parent in filled
        axes.plot(
            (depths[parent], depths[t]),
            (height_of[parent], height_of[t]),
            color=ACCEPTED_COLOUR if is_accepted else EDGE_COLOUR,
            linewidth=2.2 if is_accepted else 0.8,
            zorder=1,
        )
    for t, name in enumerate(names):
        box = {
            "boxstyle": "round,pad=0.25",
            "facecolor": ACCEPTED_COLOUR if t in filled else REJECTED_COLOUR,
            "edgecolor": "none",
        }
        axes.text(
            depths[t],
            height_of[t],
            # A dollar would start a formula.
            name.replace("$", r"\$"),
            color="white" if t in filled else "black",
            ha="center",
            va="center",
            fontsize=8,
            bbox=box,
            zorder=2,
        )
    figure.savefig(path, dpi=160)


def _heights(tree: DraftTree) -> list[float]:
    """Return each node's height in the picture: leaves a row each, from the top down, parents midway of their children."""
    heights = [0.0] * len(tree)
    next_row = 0
    stack = [(root, False) for root in reversed(tree.children(ROOT))]
    while stack:
        node, is_placed = stack.pop()
        children = tree.children(node)
        if not children:
            heights[node] = -next_row
            next_row += 1
        elif is_placed:
            heights[node] = (heights[children[0]] + heights[children[-1]]) / 2
        else:
            stack.append((node, True))
            stack += [(child, False) for child in reversed(children)]
    return heights
