"""Join a tree's convolution with its activation and with the copies of what the cache keeps for the commit.

    before    y = silu(tree_causal_conv1d(x, history, weight, bias, window));  copy_(buffer, x);  copy_(keys, part of y)
    after     y, kept, part = tree_conv_silu(x, history, weight, bias, window, first, heads, dim)
              copy_(buffer, kept);  copy_(keys, part)

The lowering writes where the copies would, so that one kernel reads the inputs once and writes everything. As a loop of
Inductor's the convolution took four times as long as its bytes: each element reads columns of weights and history, two bytes
of every eight. Left alone: another activation, a kernel of 1 or of more than 4, a convolution whose inputs no buffer keeps;
and on a CPU everything, since there a loop that fuses costs less than a call.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from treewy_inductor import ops, ops_combined
from treewy_inductor.passes.emit_node import emit

aten, prims = torch.ops.aten, torch.ops.prims


def join_conv_silu(graph: fx.Graph) -> int:
    """Join every convolution of ``graph`` that silu follows and whose inputs are kept; return how many."""
    joined = 0
    for convolution in graph.find_nodes(op="call_function", target=ops.tree_causal_conv1d):
        inputs, weight = _node(convolution.args[0]), _node(convolution.args[2])
        end = _silu_of(convolution)
        sources = {copy: _source(copy) for copy in graph.find_nodes(op="call_function", target=aten.copy_.default)}
        copies = [copy for copy, source in sources.items() if source is inputs]
        if end is None or len(copies) != 1 or not 2 <= weight.meta["val"].shape[1] <= 4:
            continue
        parts = {copy: part for copy, source in sources.items() if (part := _heads_of(source, end)) is not None}
        # The keys, and nothing else that is kept as it comes out of the convolution.
        part_copy, part = next(iter(parts.items())) if len(parts) == 1 else (None, (0, 0, 0))
        with graph.inserting_before(convolution):
            joint = emit(graph, convolution, ops_combined.tree_conv_silu, *convolution.args, *part)
            output, kept, again = (emit(graph, convolution, operator.getitem, joint, place) for place in range(3))
        end.replace_all_uses_with(output)
        copies[0].replace_input_with(_node(copies[0].args[1]), kept)
        if part_copy is not None:
            part_copy.replace_input_with(_node(part_copy.args[1]), again)
        joined += 1
    if joined:
        graph.eliminate_dead_code()
        graph.lint()
    return joined


def _heads_of(source: fx.Node, end: fx.Node) -> tuple[int, int, int] | None:
    """Return first channel, heads and dim if ``source`` is a part of ``end`` ``[B, C, N]`` seen as ``[B, N, heads, dim]``."""
    if source.target not in (aten.view.default, aten.reshape.default) or source.meta["val"].dim() != 4:
        return None
    item = _node(source.args[0])
    split = item.args[0] if item.target is operator.getitem else None
    if not isinstance(split, fx.Node) or split.target is not aten.split_with_sizes.default:
        return None
    rows, sizes, *axis = split.args
    is_last = axis in ([-1], [2])
    if not is_last or _node(rows).target is not aten.permute.default or _node(rows).args != (end, [0, 2, 1]):
        return None
    B, _, N = end.meta["val"].shape
    heads, dim = source.meta["val"].shape[2:]
    place: Any = item.args[1]
    widths: Any = sizes
    if tuple(source.meta["val"].shape[:2]) != (B, N) or widths[place] != heads * dim:
        return None
    return sum(widths[:place]), heads, dim


def _node(argument: Any) -> fx.Node:
    assert isinstance(argument, fx.Node)
    return argument


def _source(copy: fx.Node) -> fx.Node:
    """Return what a copy into a buffer copies, behind the forms in which functionalization writes it."""
    value = _node(copy.args[1])
    while value.target in (aten.copy.default, aten.alias.default, aten.detach.default):
        source = _node(value.args[1 if value.target is aten.copy.default else 0])
        if source.meta["val"].dtype != value.meta["val"].dtype:
            break
        value = source
    return value


def _silu_of(node: fx.Node) -> fx.Node | None:
    """Return the end of ``x / (1 + exp(-x))`` in node's dtype, computed in float32, if that is all that reads the node."""
    dtype = node.meta["val"].dtype
    wide = node if dtype == torch.float32 else _only_user(node, prims.convert_element_type.default, torch.float32)
    if wide is None or len(wide.users) != 2:
        return None
    negative = next((user for user in wide.users if user.target is aten.neg.default), None)
    power = negative and _only_user(negative, aten.exp.default)
    below = power and _only_user(power, aten.add.Tensor, 1)
    ratio = below and _only_user(below, aten.div.Tensor)
    if ratio is None or ratio.args != (wide, below):
        return None
    return ratio if wide is node else _only_user(ratio, prims.convert_element_type.default, dtype)


def _only_user(node: fx.Node, target: object, *rest: object) -> fx.Node | None:
    """Return the one node that reads ``node``, if it calls ``target``, with ``rest`` behind the node if that is given."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    fits = user.target is target and (not rest or (user.args == (node, *rest) and not user.kwargs))
    return user if fits else None
