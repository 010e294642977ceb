"""Replace the causal convolution behind each ``conv_in`` marker by the one that follows a tree's paths.

    before    conv_in(x, history, window) [B,C,K+N] -> to dtype -> convolution -> slice -> silu -> slice(-N)  [B,C,N]
    after     tree_causal_conv1d(x, history, weight, bias, window) -> silu                                   [B,C,N]

Each node behind the marker is followed by which column of ``[history, x]`` is the newest it reads. Which of them is the
convolution prove_causal_conv.py finds; what follows it up to the nodes that hold the N new columns alone is repeated on those.
Convolutions that are equal node by node, such as those of a model's layers, are proven once.

    B batch   C channels   N nodes   K kernel and history columns
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import replace

import torch
from torch import fx

from treewy_inductor import compat, ops, records
from treewy_inductor.passes.check_conv_on_a_tree import check_conv_on_a_tree
from treewy_inductor.passes.emit_node import emit, emit_cast, emit_layout
from treewy_inductor.passes.follow_columns import Columns, follow_columns
from treewy_inductor.passes.propose_region import Unlike
from treewy_inductor.passes.prove_causal_conv import Convolution, follows, prove_causal_conv, value_of
from treewy_inductor.passes.region_key import description, nodes_before
from treewy_inductor.records import Proven

log = logging.getLogger(__name__)
aten = torch.ops.aten

KIND = "causal_conv1d"


def rewrite_causal_conv(graph: fx.Graph, check: bool = False) -> int:
    """Rewrite every proven convolution of ``graph``; return how many were rewritten.

    Args:
        check: also run each, as rewritten, against the model's own convolution along paths of a random tree.
    """
    rewritten = 0
    order = {node: place for place, node in enumerate(graph.nodes)}
    proven: dict[str, tuple[int, tuple[fx.Node, ...], Convolution]] = {}
    for marker in graph.find_nodes(op="call_function", target=ops.conv_in):
        started = time.perf_counter()
        layer, slot = (int(str(number)) for number in marker.args[3:5])
        try:
            columns, new = follow_columns(marker, order)
            key, nodes = _described(marker, columns, new)
            is_new = key not in proven
            if is_new:
                with compat.without_fake_tensors():
                    proven[key] = layer, nodes, prove_causal_conv(marker, columns, new, order)
        except Unlike as unlike:
            refusal = records.refuse(KIND, layer, slot, unlike.node, unlike.reason)
            log.debug("left as it is: %s", refusal.sentence())
            records.note(refusal)
            continue
        proven_by, theirs, equal = proven[key]
        found = equal if is_new else _counterpart(equal, dict(zip(theirs, nodes, strict=True)))
        seconds = time.perf_counter() - started if is_new else 0.0
        record = _record(marker, found, (layer, slot, proven_by), len(columns), seconds)
        before = len(graph.nodes)
        again = _write(graph, marker, found, columns)
        wrong = _wrong_on_a_tree(graph, marker, columns, again) if check else ""
        if wrong:
            records.note(records.refuse(KIND, layer, slot, found.node, wrong))
            continue
        records.note(replace(record, nodes_after=len(graph.nodes) - before))
        for end, node in again.items():
            end.replace_all_uses_with(node)
        log.debug("layer %d: %s", layer, record)
        rewritten += 1
    if proven:
        graph.eliminate_dead_code()
        compat.sort_nodes(graph)
        graph.lint()
    return rewritten


def _described(marker: fx.Node, columns: dict[fx.Node, Columns], new: list[fx.Node]) -> tuple[str, tuple[fx.Node, ...]]:
    """Return a key of all that a proof looks at, and its nodes: markers of equal keys correspond node by node."""

    def is_edge(node: fx.Node) -> bool:
        return node is marker or node.op == "placeholder"

    nodes = nodes_before(list(columns), is_edge)
    digest = hashlib.sha256(repr([value_of(marker, place).shape for place in (0, 1)]).encode())
    for node, column in columns.items():
        digest.update(repr((column, node in new, [user in columns for user in node.users])).encode())
    digest.update(description(nodes, is_edge).encode())
    return digest.hexdigest(), nodes


def _counterpart(found: Convolution, theirs: dict[fx.Node, fx.Node]) -> Convolution:
    bias = None if found.bias is None else theirs[found.bias]
    ends = tuple(theirs[end] for end in found.ends)
    return replace(found, node=theirs[found.node], weight=theirs[found.weight], bias=bias, ends=ends)


def _wrong_on_a_tree(graph: fx.Graph, marker: fx.Node, columns: dict[fx.Node, Columns], again: dict[fx.Node, fx.Node]) -> str:
    compat.sort_nodes(graph)
    return check_conv_on_a_tree(marker, columns, again, {node: place for place, node in enumerate(graph.nodes)})


def _write(graph: fx.Graph, marker: fx.Node, found: Convolution, columns: dict[fx.Node, Columns]) -> dict[fx.Node, fx.Node]:
    """Write the op, and what follows it once more on the new columns; return what is to stand for each end."""
    inputs, history, window = (each for each in marker.args[:3] if isinstance(each, fx.Node))
    C, K = inputs.meta["val"].shape[1], history.meta["val"].shape[2]
    used = {each for each in columns if any(follows(end, each, columns) for end in found.ends)}
    with graph.inserting_before(min(found.ends, key=list(columns).index)):
        dtype = found.node.meta["val"].dtype
        operands = [emit_cast(graph, each, dtype) for each in (inputs, history)]
        weight = emit_layout(graph, found.weight, _natural(found.weight), (C, K))
        bias = None if found.bias is None else emit_layout(graph, found.bias, _natural(found.bias), (C,))
        op = emit(graph, found.node, ops.tree_causal_conv1d, *operands, weight, bias, window)
        axis = columns[found.node].axis
        again = {found.node: emit_layout(graph, op, [0, 2, 1], tuple(op.meta["val"].mT.shape)) if axis == 1 else op}
        for node in columns:
            if node is found.node or node not in used or not any(source in again for source in node.all_input_nodes):
                continue
            again[node] = _repeat(graph, node, again)
    return {end: again[end] for end in found.ends}


def _repeat(graph: fx.Graph, node: fx.Node, again: dict[fx.Node, fx.Node]) -> fx.Node:
    if node.target is aten.slice.Tensor:
        return again[node.args[0]]  # type: ignore[index]
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: again.get(each, each))
    return emit(graph, node, node.target, *args, **kwargs)


def _natural(node: fx.Node) -> list[int]:
    return list(range(node.meta["val"].dim()))


def _record(marker: fx.Node, found: Convolution, place: tuple[int, int, int], nodes: int, seconds: float) -> Proven:
    layer, slot, proven_by = place
    source, code = records.source_of(found.node)
    roles = {"inputs": str(marker.args[0]), "weight": found.weight.name, "output": found.node.name}
    if found.bias is not None:
        roles["bias"] = found.bias.name
    return Proven(
        kind=KIND,
        layer=layer,
        slot=slot,
        roles=roles,
        facts={"taps": value_of(marker, 1).shape[2], "dtype": str(found.node.meta["val"].dtype).removeprefix("torch.")},
        error=found.error,
        runner_up=found.runner_up,
        nodes_before=nodes,
        nodes_after=0,
        source=source,
        code=code,
        module=records.module_of(found.node),
        seconds=seconds,
        proven_by=proven_by,
    )
