"""DraftTree: the ways to make one, what it refuses, networkx and drawings."""

from __future__ import annotations

import builtins
from pathlib import Path

import networkx as nx
import pytest
import torch

from tests.trees import BRANCHES, CHAIN, FOREST, random_parents
from treewy_inductor.tree import MAX_NODES, DraftTree


def test_widths_number_nodes_level_by_level() -> None:
    assert DraftTree.from_widths((2, 3)).parents == [-1, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(DraftTree.from_widths((3, 3, 3))) == 40
    assert DraftTree.from_widths(()).parents == [-1]
    assert DraftTree.from_widths((1,) * 6).parents == CHAIN


def test_paths_share_their_common_prefix() -> None:
    tree = DraftTree.from_paths(7, [[1, 2, 3], [1, 2, 4], [5], [], [1, 2], [5, 1]])
    assert tree.tokens == [7, 1, 2, 3, 4, 5, 1]
    assert tree.parents == [-1, 0, 1, 2, 2, 0, 5]


def test_equal_tokens_under_different_parents_stay_apart() -> None:
    tree = DraftTree.from_paths(0, [[1, 9], [2, 9]])
    assert tree.parents == [-1, 0, 1, 0, 3]
    assert tree.tokens == [0, 1, 9, 2, 9]


def test_paths_give_back_their_sequences() -> None:
    paths = [[3, 1, 4], [3, 1, 5, 9], [2, 6]]
    tree = DraftTree.from_paths(8, paths)
    assert tree.tokens is not None
    leaves = [t for t in range(len(tree)) if not tree.children(t)]
    assert [[tree.tokens[node] for node in tree.path_to(leaf)] for leaf in leaves] == [[8, *path] for path in paths]


def test_tensors_are_taken_as_parents_and_tokens() -> None:
    tree = DraftTree.from_parents(torch.tensor([-1, 0, 0]), torch.tensor([4, 5, 6]))
    assert tree == DraftTree([-1, 0, 0], [4, 5, 6])


def test_padded_appends_inert_nodes() -> None:
    padded = DraftTree.from_parents([-1, 0]).padded(5)
    assert padded.dtype == torch.int32
    assert padded.tolist() == [-1, 0, -2, -2, -2]


def test_changing_the_argument_does_not_change_the_tree() -> None:
    parents = [-1, 0]
    tree = DraftTree(parents)
    parents[1] = 5
    assert tree.parents == [-1, 0]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "parents is empty"),
        ([0], r"parents\[0\] is 0, expected -1"),
        ([-1, 2, 0], r"parents\[1\] is 2, which is not before node 1: order parents before children"),
        ([-1, 0, 2], r"parents\[2\] is 2, which is not before node 2"),
        ([-1, -2], r"parents\[1\] is -2, expected a node or -1 at a root"),
        ([-1] * (MAX_NODES + 1), "parents has 257 nodes, at most 256"),
    ],
)
def test_wrong_parents_are_refused(parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree.from_parents(parents)


def test_wrong_arguments_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="tokens has 1 entries for 2 nodes: give one a node"):
        DraftTree([-1, 0], [3])
    with pytest.raises(ValueError, match=r"widths\[1\] is 0, expected at least 1"):
        DraftTree.from_widths((3, 0))
    with pytest.raises(ValueError, match=r"more than 256 nodes at level 2: use smaller widths"):
        DraftTree.from_widths((10, 10, 10))
    with pytest.raises(ValueError, match="nodes is 2 for a tree of 7: raise max_nodes"):
        DraftTree.from_parents(CHAIN).padded(2)
    with pytest.raises(ValueError, match=r"parents has shape \[1, 2\], expected one dimension"):
        DraftTree.from_parents(torch.tensor([[-1, 0]]))
    with pytest.raises(ValueError, match="labels has 1 entries for 7 nodes"):
        DraftTree.from_parents(CHAIN).text(labels=["a"])
    with pytest.raises(ValueError, match=r"widths\[1\] is 2.5, expected an integer"):
        DraftTree.from_widths((3, 2.5))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"paths\[1\]\[0\] is 'a', expected an integer"):
        DraftTree.from_paths(1, [[2], ["a"]])  # type: ignore[list-item]


@pytest.mark.parametrize("seed", range(8))
def test_networkx_round_trip_keeps_the_tree(seed: int) -> None:
    tree = DraftTree(random_parents(31, seed), list(range(100, 131)))
    graph = tree.to_networkx()
    assert nx.is_branching(graph)
    assert DraftTree.from_networkx(graph) == tree
    # By other names the same tree comes back, numbered anew.
    again = DraftTree.from_networkx(nx.relabel_nodes(graph, {node: f"node {node}" for node in graph}))
    assert again.tokens is not None
    assert tree.tokens is not None
    pairs = {(tree.tokens[p] if p >= 0 else None, token) for p, token in zip(tree.parents, tree.tokens, strict=True)}
    assert pairs == {(again.tokens[p] if p >= 0 else None, token) for p, token in zip(again.parents, again.tokens, strict=True)}


def test_networkx_graph_with_names_is_numbered_from_its_root() -> None:
    assert DraftTree.from_networkx(nx.DiGraph([("b", "d"), ("a", "b"), ("a", "c")])).parents == [-1, 0, 0, 1]


def test_networkx_graph_of_nodes_in_any_order_keeps_their_numbers() -> None:
    graph = nx.DiGraph([(1, 2), (0, 3), (0, 1)])
    assert DraftTree.from_networkx(graph).parents == [-1, 0, 1, 0]
    assert DraftTree.from_networkx(nx.DiGraph([(2, 1), (1, 0)])).parents == [-1, 0, 1]


def test_networkx_graph_that_is_no_tree_is_refused() -> None:
    with pytest.raises(ValueError, match="the graph is undirected: give a networkx"):
        DraftTree.from_networkx(nx.Graph([(0, 1)]))
    with pytest.raises(ValueError, match="node 2 has 2 parents"):
        DraftTree.from_networkx(nx.DiGraph([(0, 2), (1, 2)]))
    with pytest.raises(ValueError, match="has no root"):
        DraftTree.from_networkx(nx.DiGraph([(0, 1), (1, 0)]))
    with pytest.raises(ValueError, match="only 1 of 3 nodes hang below a root"):
        DraftTree.from_networkx(nx.compose(nx.DiGraph([(1, 2), (2, 1)]), nx.empty_graph(1, nx.DiGraph)))


def test_depths_count_from_each_root() -> None:
    assert DraftTree.from_parents(BRANCHES).depths == [0, 1, 1, 2, 2, 2, 3, 3, 4]
    assert DraftTree.from_parents(FOREST).depths == [0, 1, 0, 1, 1, 1, 2, 0]


def test_text_shows_every_branch_and_the_accepted_path() -> None:
    tree = DraftTree.from_paths(1, [[2, 3, 4], [2, 5], [6, 7]])
    assert tree.text(accepted=[0, 1, 4]) == "\n".join(
        [
            "1 *",
            "├─ 2 *",
            "│  ├─ 3",
            "│  │  └─ 4",
            "│  └─ 5 *",
            "└─ 6",
            "   └─ 7",
        ]
    )
    assert DraftTree([-1, 0]).text(labels=["a", "\n"]) == "a\n└─ \\n"
    assert DraftTree.from_parents(FOREST).text().splitlines()[0] == "0"
    assert len(DraftTree.from_parents(FOREST).text().splitlines()) == len(FOREST)


def test_picture_holds_every_label(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    labels = [f"word{t}" for t in range(40)]
    target = tmp_path / "tree.svg"
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        DraftTree.from_widths((3, 3, 3)).picture(str(target), labels, accepted=[0, 2, 7])
    drawn = target.read_text()
    assert all(f">{label}<" in drawn for label in labels)


def test_picture_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real_import = builtins.__import__

    def without_matplotlib(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'treewy-inductor\[picture\]'"):
        DraftTree.from_parents(CHAIN).picture(str(tmp_path / "tree.png"))
