"""Take a slice of each part of a sum instead of a slice of the sum.

    before    slice(add(a, b), dim, start, end)
    after     add(slice(a, dim, start, end), slice(b, dim, start, end))

Mamba2 adds its skip connection to outputs that are still padded to whole chunks, so no node has the recurrence's output
alone and one value a token. A sum with another reader stays, and so does one that broadcasts along the sliced axis.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from treewy_inductor.passes.emit_node import emit

aten = torch.ops.aten


def slice_before_add(graph: fx.Graph, check: bool = False) -> int:
    """Rewrite every slice of a sum in ``graph``; return how many were rewritten. ``check`` is for other passes."""
    rewritten = 0
    for cut in list(graph.find_nodes(op="call_function", target=aten.slice.Tensor)):
        total, dim = cut.args[0], cut.args[1] if len(cut.args) > 1 else 0
        if not isinstance(total, fx.Node) or not _is_sum_along(total, dim):
            continue
        with graph.inserting_before(cut):
            parts = [emit(graph, total, aten.slice.Tensor, part, *cut.args[1:]) for part in total.args]
            result = emit(graph, total, aten.add.Tensor, *parts)
        cut.replace_all_uses_with(result)
        graph.erase_node(cut)
        graph.erase_node(total)
        rewritten += 1
    return rewritten


def _is_sum_along(total: fx.Node, dim: object) -> bool:
    """Whether a node adds two tensors of its own size along ``dim``, for one reader."""
    if total.target is not aten.add.Tensor or len(total.users) != 1 or total.kwargs or not isinstance(dim, int):
        return False
    shape = total.meta["val"].shape
    values = [part.meta.get("val") if isinstance(part, fx.Node) else None for part in total.args]
    return all(isinstance(value, Tensor) and value.dim() == len(shape) and value.shape[dim] == shape[dim] for value in values)
