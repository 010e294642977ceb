"""A tree of draft tokens: which node follows which, and what token each one holds.

Node 0 is the root, the token accepted last, whose own state is not committed yet. Parents stand before their children, so
that one pass in index order meets every ancestor first. This is the host's view; :mod:`treewy_inductor.encoding` holds what
the device reads.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import networkx as nx

MAX_NODES = 256
ROOT, INERT = -1, -2


@dataclass(frozen=True)
class DraftTree:
    """A draft tree, checked on construction.

    Args:
        parents: for each node the index of its parent, smaller than its own; -1 at a root. Node 0 is a root; further roots
            make a forest, of which acceptance follows node 0's tree alone.
        tokens: for each node its token, or None where only the shape is known. ``tokens[0]`` was accepted already.
    """

    parents: list[int]
    tokens: list[int] | None = None

    def __post_init__(self) -> None:
        # Copies, so that nobody else can change a checked tree; __setattr__ is closed by frozen=True.
        object.__setattr__(self, "parents", _integers("parents", self.parents))
        if self.tokens is not None:
            object.__setattr__(self, "tokens", _integers("tokens", self.tokens))
        if not self.parents:
            raise ValueError("parents is empty: a draft tree holds at least its root, the token accepted last")
        if len(self.parents) > MAX_NODES:
            raise ValueError(f"parents has {len(self.parents)} nodes, at most {MAX_NODES} are supported: draft fewer nodes")
        if self.parents[0] != ROOT:
            raise ValueError(f"parents[0] is {self.parents[0]}, expected -1: node 0 is the root")
        for t, parent in enumerate(self.parents):
            if parent >= t:
                raise ValueError(f"parents[{t}] is {parent}, which is not before node {t}: order parents before children")
            if parent < ROOT:
                raise ValueError(
                    f"parents[{t}] is {parent}, expected a node or -1 at a root: padding is added by DraftTree.padded"
                )
        if self.tokens is not None and len(self.tokens) != len(self.parents):
            raise ValueError(f"tokens has {len(self.tokens)} entries for {len(self.parents)} nodes: give one a node")

    @classmethod
    def from_parents(cls, parents: Sequence[int] | Tensor, tokens: Sequence[int] | Tensor | None = None) -> DraftTree:
        """Return the tree with these parents, given as a sequence or as a one-dimensional tensor."""
        return cls(_listed("parents", parents), None if tokens is None else _listed("tokens", tokens))

    @classmethod
    def from_widths(cls, widths: Sequence[int]) -> DraftTree:
        """Return the tree in which every node of level i has ``widths[i]`` children: (3, 3, 3) has 1 + 3 + 9 + 27 nodes.

        Nodes are numbered level by level. ``widths=()`` is the root alone, and all ones make a chain.
        """
        parents, level = [ROOT], [0]
        for i, width in enumerate(_integers("widths", widths)):
            if width < 1:
                raise ValueError(f"widths[{i}] is {width}, expected at least 1: leave the level out to end the tree")
            if len(parents) + len(level) * width > MAX_NODES:
                raise ValueError(f"widths {tuple(widths)} make more than {MAX_NODES} nodes at level {i}: use smaller widths")
            first = len(parents)
            parents += [parent for parent in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return cls(parents)

    @classmethod
    def from_paths(cls, root: int, paths: Sequence[Sequence[int]]) -> DraftTree:
        """Return the trie of ``paths`` below the token ``root``: a prefix that several paths share is drafted once.

        Nodes are numbered in the order in which the paths first need them, so that the first path is ``0, 1, 2, ...``.

        Args:
            root: the token accepted last; it becomes node 0 and is not part of the paths.
            paths: continuations of ``root``, token by token; an empty one adds nothing.
        """
        parents, tokens = [ROOT], _integers("root", [root])
        child_of: dict[tuple[int, int], int] = {}
        for i, path in enumerate(paths):
            node = 0
            for token in _integers(f"paths[{i}]", path):
                if (node, token) not in child_of:
                    child_of[node, token] = len(parents)
                    parents.append(node)
                    tokens.append(token)
                node = child_of[node, token]
        return cls(parents, tokens)

    @classmethod
    def from_networkx(cls, graph: nx.DiGraph) -> DraftTree:
        """Return the tree of a directed graph whose edges run from parent to child.

        Nodes may have any names; they are numbered breadth first from the root, each parent's children in the order in
        which the graph holds them. Names that are such numbers already, 0 to n-1 with every parent before its children,
        stay: what :meth:`to_networkx` gives comes back as it was. If all nodes have an attribute ``token``, these become the
        tokens.
        """
        if not graph.is_directed():
            raise ValueError("the graph is undirected: give a networkx.DiGraph whose edges run from parent to child")
        for name, degree in graph.in_degree():
            if degree > 1:
                raise ValueError(f"node {name!r} has {degree} parents, expected at most 1: give a tree, not a graph")
        if set(graph) == set(range(len(graph))) and all(parent < child for parent, child in graph.edges):
            names = list(range(len(graph)))
            return cls([next(iter(graph.predecessors(name)), ROOT) for name in names], _tokens_of(graph, names))
        level = [name for name, degree in graph.in_degree() if degree == 0]
        if not level:
            raise ValueError(f"a graph of {len(graph)} nodes has no root: one node must have no parent")
        parents: list[int] = []
        index: dict[object, int] = {}
        while level:
            for name in level:
                index[name] = len(parents)
                parents.append(next((index[parent] for parent in graph.predecessors(name)), ROOT))
            level = [child for name in level for child in graph.successors(name)]
        if len(index) != len(graph):
            raise ValueError(f"only {len(index)} of {len(graph)} nodes hang below a root: the graph has a cycle")
        return cls(parents, _tokens_of(graph, index))

    def to_networkx(self) -> nx.DiGraph:
        """Return the tree as a directed graph with an edge from each parent to its child and the tokens as ``token``."""
        import networkx as nx

        graph = nx.DiGraph()
        for t, parent in enumerate(self.parents):
            graph.add_node(t, **({} if self.tokens is None else {"token": self.tokens[t]}))
            if parent != ROOT:
                graph.add_edge(parent, t)
        return graph

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> list[int]:
        """Each node's distance from its root, which itself has depth 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    def children(self, node: int) -> list[int]:
        """Return the children of ``node`` in index order."""
        return [t for t, parent in enumerate(self.parents) if parent == node]

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from the root down to ``node``, both included."""
        path = [node]
        while self.parents[path[-1]] != ROOT:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def padded(self, nodes: int) -> Tensor:
        """Return the parents as ``[nodes]`` int32 on the CPU, with inert nodes (-2) after the tree's own."""
        if len(self) > nodes:
            raise ValueError(f"nodes is {nodes} for a tree of {len(self)}: raise max_nodes or draft fewer nodes")
        return torch.tensor(self.parents + [INERT] * (nodes - len(self)), dtype=torch.int32)

    def text(self, labels: Sequence[str] | None = None, accepted: Sequence[int] = ()) -> str:
        """Return the tree drawn in text, one node a line; see :func:`treewy_inductor.tree_drawing.draw_text`."""
        from treewy_inductor.tree_drawing import draw_text

        return draw_text(self, labels, accepted)

    def picture(self, path: str, labels: Sequence[str] | None = None, accepted: Sequence[int] = ()) -> None:
        """Write the tree as a picture to ``path``; see :func:`treewy_inductor.tree_drawing.draw_picture`."""
        from treewy_inductor.tree_drawing import draw_picture

        draw_picture(self, path, labels, accepted)


def _tokens_of(graph: nx.DiGraph, names: Iterable[object]) -> list[int] | None:
    tokens = [graph.nodes[name].get("token") for name in names]
    return None if None in tokens else tokens


def _integers(name: str, values: Iterable[Any]) -> list[int]:
    found = []
    for t, value in enumerate(values):
        try:
            found.append(operator.index(value))
        except TypeError:
            raise ValueError(f"{name}[{t}] is {value!r}, expected an integer") from None
    return found


def _listed(name: str, values: Sequence[int] | Tensor) -> list[int]:
    if not isinstance(values, Tensor):
        return list(values)
    if values.dim() != 1:
        raise ValueError(f"{name} has shape {list(values.shape)}, expected one dimension: give one tree at a time")
    return values.tolist()
