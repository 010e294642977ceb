"""Join products of the same rows with few columns each, two and two.

    before    x @ a,  x @ b                      a [R, n], b [R, m], n and m at most 64
    after     narrow_products(x, a, b)

A model's gates are such: 16 to 64 columns of a projection of all channels. A library's kernel of so few columns takes 4 to 6 us
whatever it reads, two a layer. Left alone: products in float32, whose accuracy is the library's; rows so many that the library
is bound by bytes; sums so short that nothing is left to share.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from treewy_inductor import compat, ops_combined
from treewy_inductor.passes.emit_node import emit

aten = torch.ops.aten

MOST_COLUMNS, MOST_ROWS, LEAST_SUM = 64, 2048, 256


def join_narrow_products(graph: fx.Graph) -> int:
    """Join what can be joined in ``graph``; return how many pairs were."""
    groups: dict[tuple[fx.Node, tuple[int, ...]], list[fx.Node]] = defaultdict(list)
    for product in graph.find_nodes(op="call_function", target=aten.mm.default):
        if _is_narrow(product):
            rows: Any = product.args[0]
            groups[_unviewed(rows), tuple(rows.meta["val"].shape)].append(product)
    joined = 0
    for products in groups.values():
        for left, right in zip(products[::2], products[1::2], strict=False):
            # Behind the second, whose weight may be made only there; sorting moves the first one's readers behind it.
            with graph.inserting_before(right):
                both = emit(graph, left, ops_combined.narrow_products, left.args[0], left.args[1], right.args[1])
                for place, product in enumerate((left, right)):
                    product.replace_all_uses_with(emit(graph, product, operator.getitem, both, place))
            joined += 1
    if joined:
        compat.sort_nodes(graph)
        graph.eliminate_dead_code()
        graph.lint()
    return joined


def _is_narrow(product: fx.Node) -> bool:
    operands: tuple[Any, ...] = product.args
    rows, weight = (each.meta["val"] for each in operands)
    sizes = (*rows.shape, weight.shape[1])
    if rows.dtype not in (torch.bfloat16, torch.float16) or not all(isinstance(size, int) for size in sizes):
        return False
    M, R, columns = sizes
    return bool(M <= MOST_ROWS and R >= LEAST_SUM and columns <= MOST_COLUMNS)


def _unviewed(node: Any) -> fx.Node:
    while node.target in (aten.view.default, aten.reshape.default):
        node = node.args[0]
    assert isinstance(node, fx.Node)
    return node
