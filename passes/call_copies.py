"""Make copies of layers' results into buffers calls of one op, so that no kernel is compiled for each kind of copy.

    before    copy_(buffer, view of a result of invoke_subgraph)
    after     treewy::store(buffer, view of a result of invoke_subgraph)

A result of a subgraph lies in memory, so its copy cannot become part of the loop that computes it: it is a kernel that only
copies, and each shape and layout of a buffer needs one. On a CPU, where a kernel costs a run of the C++ compiler and a call a
few microseconds, calling is the better trade. A copy of anything else stays, since Inductor computes it where it is to stand.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from treewy_inductor import compat, ops

aten = torch.ops.aten


def call_copies(graph: fx.Graph) -> int:
    """Replace each copy of a subgraph's result into a buffer that is an input; return how many were replaced."""
    called = 0
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        buffer, value = copy.args[:2]
        while value.target is aten.copy.default and value.meta["val"].dtype == buffer.meta["val"].dtype:
            value = value.args[1]
        is_whole = value.meta["val"].shape == buffer.meta["val"].shape
        if copy.users or buffer.op != "placeholder" or not is_whole or not _is_result_of_a_subgraph(value):
            continue
        with graph.inserting_before(copy):
            store = graph.call_function(ops.store, (buffer, value))
        store.meta.update(copy.meta)
        store.meta["val"] = None
        graph.erase_node(copy)
        called += 1
    if called:
        graph.eliminate_dead_code()
        graph.lint()
    return called


def _is_result_of_a_subgraph(value: fx.Node) -> bool:
    """Whether a value is a subgraph's result or a view of one."""
    while value.op == "call_function":
        if value.target is compat.INVOKE_SUBGRAPH:
            return True
        is_op = isinstance(value.target, torch._ops.OpOverload)
        if value.target is not operator.getitem and not (is_op and value.target._schema.returns[0].alias_info is not None):  # type: ignore[union-attr]
            return False
        value = value.args[0]  # type: ignore[assignment]
    return False
