"""Replace each proven recurrence between a TreeCache's markers by the op that verifies a tree.

    before    state_in(state, tree) -> S_0;  the model's rule(q, k, v, log_decay, beta, S_0) -> output, S_N
              state_out(S_N, buffers) -> pseudo-values, keys, path decays, key scales
    after     tree_gated_delta(q, k, v, log_decay, beta, state, tree) -> output, pseudo-values, path decays, key scales

What was proven to be linear attention with a decay and no correction becomes tree_linear_attention, which returns the same.
The markers of the other commit policies ask for tree_gated_delta_trunk, for tree_gated_delta_fused, which overwrites the state,
and for tree_gated_delta_snapshots, which writes every node's state into a buffer: the last two stand in the graph as functional
calls that Inductor turns into the write in place.
A chain's final state means nothing on a tree, so it is not computed any more: the cache rebuilds the accepted node's state
from what the op returns. A recurrence that could not be proven is left as it is, with a record that says why.
"""

from __future__ import annotations

import logging
import operator
from typing import Any

import torch
from torch import fx

from treewy_inductor import compat, ops, ops_fused, ops_linear, ops_replay, ops_store_all, records
from treewy_inductor.passes.check_on_a_tree import check_on_a_tree
from treewy_inductor.passes.deepen_cut import Cut
from treewy_inductor.passes.emit_node import emit, emit_cast, emit_contiguous_like, emit_layout
from treewy_inductor.passes.recognize_gated_delta import KIND, Recurrence, recognize

log = logging.getLogger(__name__)
aten = torch.ops.aten


def rewrite_gated_delta(graph: fx.Graph, check: bool = False) -> int:
    """Rewrite every proven recurrence of ``graph``; return how many were rewritten.

    Args:
        check: also run each, as rewritten, against the model's own rule along paths of a random tree.
    """
    rewritten = 0
    for found in recognize(graph):
        if isinstance(found, records.Refused):
            log.debug("left as it is: %s", found.sentence())
            records.note(found)
            continue
        output, buffers = _rewrite(graph, found)
        wrong = _wrong_on_a_tree(graph, found, output, buffers) if check else ""
        graph.erase_node(found.marked.state_out)
        if wrong:
            last = found.output.node
            records.note(records.refuse(KIND, found.marked.layer, found.marked.slot, last, wrong))
            continue
        records.note(found.record)
        log.debug("layer %d: %s", found.marked.layer, found.record)
        rewritten += 1
    if rewritten:
        # A buffer may be written before the output that its op now stands at: order first, since elimination checks it.
        compat.sort_nodes(graph)
        graph.eliminate_dead_code()
        graph.lint()
    return rewritten


def _rewrite(graph: fx.Graph, found: Recurrence) -> tuple[fx.Node, list[fx.Node]]:
    """Write the op; return what stands for the old output, and what fills the cache's buffers."""
    marked, old = found.marked, found.output.node
    B, N, _, HV, K, _ = marked.sizes
    with graph.inserting_before(old):
        query, key, value = (_by_token(graph, found, role) for role in ("query", "key", "value"))
        log_decay, beta = _log_decay(graph, found), _beta(graph, found)
        rest = (found.scale, found.norm_eps, old.meta["val"].dtype)
        if marked.keeps_states:
            output, *filled = _verify_with_states(graph, found, (query, key, value, log_decay, beta), rest)
        else:
            op = ops_replay.tree_gated_delta_trunk if marked.trunk else ops.tree_gated_delta
            operands = (query, key, value, log_decay, beta, marked.state_in.args[0], *marked.tree, *marked.trunk, *rest)
            if not found.corrects:
                op = ops_linear.tree_linear_attention
                operands = (*operands[:6], marked.tree[0], found.scale, rest[-1])
            if marked.folds_trunk:
                results = _emit_in_place(graph, old, ops_fused.tree_gated_delta_fused, operands, "state")
            else:
                results = emit(graph, old, op, *operands)
            output, pseudo_values, path_decay, key_scale, *state = (
                emit(graph, results, operator.getitem, results, i) for i in range(5 if marked.folds_trunk else 4)
            )
            wanted = marked.buffer("path_decay").meta["val"]
            if wanted.dim() > path_decay.meta["val"].dim():
                spread = emit(graph, path_decay, aten.unsqueeze.default, path_decay, -1)
                path_decay = emit(graph, path_decay, aten.expand.default, spread, [B, N, HV, K])
            buffers = {"pseudo_values": pseudo_values, "keys": key, "path_decay": path_decay, "key_scale": key_scale}
            filled = [emit_cast(graph, node, marked.buffer(name).meta["val"].dtype) for name, node in buffers.items()]
            filled += state
        layout = list(found.output.layout)
        output = emit_layout(graph, output, layout, tuple(old.meta["val"].shape))
        output = emit_contiguous_like(graph, output, old.meta["val"])
    old.replace_all_uses_with(output)
    if marked.keeps_states:
        marked.state_out.replace_all_uses_with(filled[0])
    for reader in list(marked.state_out.users):
        reader.replace_all_uses_with(filled[int(str(reader.args[1]))])
        graph.erase_node(reader)
    return output, filled


def _wrong_on_a_tree(graph: fx.Graph, found: Recurrence, output: fx.Node, buffers: list[fx.Node]) -> str:
    compat.sort_nodes(graph)
    return check_on_a_tree(found, output, buffers, {node: place for place, node in enumerate(graph.nodes)})


def _verify_with_states(
    graph: fx.Graph, found: Recurrence, roles: tuple[fx.Node, ...], rest: tuple[Any, ...]
) -> tuple[fx.Node, fx.Node]:
    """Emit the op that writes every node's state; return its output and the new contents of the buffer of states."""
    snapshots, accepted, parents = found.marked.state_in.args[:3]
    op = ops_store_all.tree_gated_delta_snapshots
    call = _emit_in_place(graph, found.output.node, op, (*roles, parents, accepted, snapshots, *rest), "snapshots")
    return emit(graph, call, operator.getitem, call, 0), emit(graph, call, operator.getitem, call, 1)


def _emit_in_place(graph: fx.Graph, old: fx.Node, op: Any, operands: tuple[Any, ...], overwritten: str) -> fx.Node:
    """Emit a functional call of an op that overwrites one operand, whose new contents come after the op's results."""
    arguments = dict(zip((each.name for each in op._schema.arguments), operands, strict=True))
    base = {overwritten: arguments.pop(overwritten)}
    target, args, kwargs = compat.functional_call(op, arguments, base)
    return emit(graph, old, target, *args, **kwargs)


def _by_token(graph: fx.Graph, found: Recurrence, role: str, vector: bool = True) -> fx.Node:
    """Lay a role out as ``[B, N, heads, D]``, without D where ``vector`` is false."""
    cut = found.cuts[role]
    B, N = found.marked.sizes[:2]
    value = cut.node.meta["val"]
    last = value.numel() // (B * N * cut.heads)
    shape = (B, N, cut.heads, last) if vector else (B, N, cut.heads)
    return emit_layout(graph, cut.node, _order_by_token(cut, B), shape)


def _order_by_token(cut: Cut, batch: int) -> list[int]:
    value = cut.node.meta["val"]
    order = list(range(value.dim()))
    has_batch = cut.axis != 0 or (value.dim() > 1 and value.shape[1] == batch and batch > 1)
    order.remove(cut.axis)
    order.insert(1 if has_batch else 0, cut.axis)
    return order


def _log_decay(graph: fx.Graph, found: Recurrence) -> fx.Node:
    B, N, _, HV, K, _ = found.marked.sizes
    if "decay" not in found.cuts:
        return _constant(graph, found, 0.0)
    value = found.cuts["decay"].node.meta["val"]
    decay = _by_token(graph, found, "decay", vector=K > 1 and value.numel() == B * N * HV * K)
    if "decay" in found.lifts:
        decay = found.lifts["decay"].emit(graph, decay)
    if found.decay == "log":
        return decay
    # A decay of 0 keeps a finite logarithm: two infinite ones would differ by NaN.
    wide = emit_cast(graph, decay, torch.promote_types(value.dtype, torch.float32))
    tiny = torch.finfo(wide.meta["val"].dtype).tiny
    return emit(graph, wide, aten.log.default, emit(graph, wide, aten.clamp_min.default, wide, tiny))


def _beta(graph: fx.Graph, found: Recurrence) -> fx.Node:
    if "beta" not in found.cuts:
        return _constant(graph, found, 1.0)
    beta = _by_token(graph, found, "beta", vector=False)
    return found.lifts["beta"].emit(graph, beta) if "beta" in found.lifts else beta


def _constant(graph: fx.Graph, found: Recurrence, value: float) -> fx.Node:
    B, N, _, HV, _, _ = found.marked.sizes
    state = found.marked.state_in
    kwargs = {"dtype": torch.float32, "device": state.meta["val"].device}
    return emit(graph, state, aten.full.default, [B, N, HV], value, **kwargs)
