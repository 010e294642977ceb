"""TreeEncoding against networkx: every tensor, every size, and refilled in place."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.trees import BRANCHES, CHAIN, FOREST, INERT_BETWEEN, ROOT_ALONE, STAR, batch_of, random_parents
from treewy_inductor.encoding import NO_WINDOW, TreeEncoding, attention_mask, derive
from treewy_inductor.reference import unpack_ancestors
from treewy_inductor.tree import DraftTree

SIZES = (1, 5, 63, 64, 65, 200, 256)


def check_row(parents: list[int], encoding: TreeEncoding, row: int) -> None:
    """Compare one row with what networkx says about the same tree."""
    nodes = len(parents)
    real = [t for t in range(nodes) if parents[t] != -2]
    graph = nx.DiGraph()
    graph.add_nodes_from(real)
    graph.add_edges_from((parents[t], t) for t in real if parents[t] >= 0)
    above = unpack_ancestors(encoding.ancestors)[row]
    expected = torch.zeros(nodes, nodes, dtype=torch.bool)
    for t in real:
        expected[t, [*nx.ancestors(graph, t), t]] = True
    assert torch.equal(above, expected)

    depth = {t: len(nx.ancestors(graph, t)) for t in real}
    assert encoding.depth[row].tolist() == [depth.get(t, -1) for t in range(nodes)]
    for t in range(nodes):
        taps = []
        for j in range(1, encoding.window.shape[2] + 1):
            higher = [i for i in expected[t].nonzero().flatten().tolist() if depth[i] == depth[t] - j]
            taps.append(NO_WINDOW if t not in depth else higher[0] if higher else depth[t] - j)
        assert encoding.window[row, t].tolist() == taps
    inner = [t for t in real if graph.out_degree(t)]
    leaves = [t for t in real if not graph.out_degree(t)]
    assert encoding.order[row].tolist() == inner + leaves + [t for t in range(nodes) if parents[t] == -2]
    assert int(encoding.internal[row]) == len(inner)
    assert int(encoding.height[row]) == (nx.dag_longest_path_length(graph) + 1 if real else 0)


@pytest.mark.parametrize("nodes", SIZES)
def test_every_tensor_agrees_with_networkx(nodes: int) -> None:
    trees = [random_parents(nodes, seed, inert=0.2 * (seed > 1)) for seed in range(4)]
    encoding = TreeEncoding(len(trees), nodes).fill(batch_of(*trees))
    for row, parents in enumerate(trees):
        check_row(parents, encoding, row)


def test_small_trees_agree_with_networkx() -> None:
    trees = [ROOT_ALONE, CHAIN, STAR, BRANCHES, FOREST, INERT_BETWEEN]
    parents = batch_of(*trees)
    encoding = TreeEncoding(*parents.shape).fill(parents)
    for row in range(len(trees)):
        check_row(parents[row].tolist(), encoding, row)


@pytest.mark.parametrize("kernel_size", [1, 2, 4, 7])
def test_window_follows_the_kernel(kernel_size: int) -> None:
    encoding = TreeEncoding(1, len(BRANCHES), kernel_size=kernel_size).fill(batch_of(BRANCHES))
    assert encoding.window.shape == (1, len(BRANCHES), kernel_size - 1)
    check_row(BRANCHES, encoding, 0)


def test_height_is_the_power_that_makes_strict_ancestry_vanish() -> None:
    for seed in range(6):
        encoding = TreeEncoding.of(DraftTree(random_parents(40, seed)))
        strict = unpack_ancestors(encoding.ancestors)[0].double().tril(-1)
        height = int(encoding.height)
        assert torch.count_nonzero(torch.linalg.matrix_power(strict, height)) == 0
        assert torch.count_nonzero(torch.linalg.matrix_power(strict, height - 1)) > 0


def test_refilling_keeps_addresses_and_forgets_the_old_tree() -> None:
    encoding = TreeEncoding(2, 9).fill(batch_of(BRANCHES, BRANCHES))
    addresses = {name: tensor.data_ptr() for name, tensor in encoding.tensors().items()}
    for trees in ((CHAIN, INERT_BETWEEN), (ROOT_ALONE, FOREST)):
        parents = torch.nn.functional.pad(batch_of(*trees), (0, 9 - max(map(len, trees))), value=-2)
        encoding.fill(parents)
        fresh = TreeEncoding(2, 9).fill(parents)
        for name, tensor in encoding.tensors().items():
            assert tensor.data_ptr() == addresses[name]
            assert torch.equal(tensor, fresh.tensors()[name]), name


def test_empty_encoding_is_what_inert_rows_give() -> None:
    fresh = TreeEncoding(2, 70)
    filled = TreeEncoding(2, 70).fill(torch.full((2, 70), -2))
    for name, tensor in fresh.tensors().items():
        assert torch.equal(tensor, filled.tensors()[name]), name


def test_compiled_code_derives_the_same_and_is_compiled_once() -> None:
    encoding = TreeEncoding(2, 5, compiled=True)
    mask = torch.zeros(2, 1, 5, 11, dtype=torch.bool)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(5):
            parents = batch_of(random_parents(5, seed), random_parents(5, seed + 9, inert=0.4))
            lengths = torch.tensor([seed, 6 - seed])
            encoding.fill(parents).fill_mask(mask, lengths)
            eager = TreeEncoding(2, 5, compiled=False).fill(parents)
            for name, tensor in encoding.tensors().items():
                assert torch.equal(tensor, eager.tensors()[name]), name
            assert torch.equal(mask, attention_mask(lengths, eager.ancestors, 11))


def test_deriving_reads_nothing_on_the_host() -> None:
    # Fake tensors have no values, so that a read on the host would raise.
    module = make_fx(lambda parents: derive(parents, 4), tracing_mode="fake")(batch_of(BRANCHES))
    assert [tuple(t.shape) for t in module(batch_of([*CHAIN, -2, -2]))] == [(1, 9, 1), (1, 9), (1, 9, 3), (1, 9), (1,), (1,)]


def test_attention_mask_shows_committed_tokens_and_ancestors() -> None:
    nodes, max_length, lengths = 65, 90, [0, 3, 25]
    trees = [random_parents(nodes, seed, inert=0.15 * seed) for seed in range(3)]
    encoding = TreeEncoding(3, nodes).fill(batch_of(*trees))
    mask = attention_mask(torch.tensor(lengths), encoding.ancestors, max_length)
    assert mask.shape == (3, 1, nodes, max_length)
    for row, (parents, length) in enumerate(zip(trees, lengths, strict=True)):
        for t in range(nodes):
            seen = set(range(length))
            node = t
            while node >= 0:
                seen.add(length + node)
                node = parents[node]
            expected = {0} if parents[t] == -2 else seen
            assert set(mask[row, 0, t].nonzero().flatten().tolist()) == expected


def test_positions_grow_with_depth_and_each_rows_length() -> None:
    encoding = TreeEncoding(2, 9).fill(batch_of(BRANCHES, CHAIN))
    positions = encoding.positions(torch.tensor([10, 0]))
    assert positions.dtype == torch.int64
    assert positions.tolist() == [[10, 11, 11, 12, 12, 12, 13, 13, 14], [0, 1, 2, 3, 4, 5, 6, 0, 0]]


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="max_nodes is 257, expected 1 to 256"):
        TreeEncoding(1, 257)
    with pytest.raises(ValueError, match=r"parents is \[1, 7\] in an encoding of \[1, 9\]: pad each row with -2"):
        TreeEncoding(1, 9).fill(batch_of(CHAIN))
