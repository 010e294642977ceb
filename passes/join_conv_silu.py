"""Join a tree's convolution with its activation and with the copy of its inputs that the cache keeps for the commit.

    before    y = silu(tree_causal_conv1d(x, history, weight, bias, window));  copy_(buffer, x)
    after     y, kept = tree_conv_silu(x, history, weight, bias, window);      copy_(buffer, kept)

The lowering writes ``kept`` where the copy would put it, so that one kernel reads the inputs once and writes both. As a loop of
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
        copies = [copy for copy in graph.find_nodes(op="call_function", target=aten.copy_.default) if _source(copy) is inputs]
        if end is None or len(copies) != 1 or not 2 <= weight.meta["val"].shape[1] <= 4:
            continue
        with graph.inserting_before(convolution):
            both = emit(graph, convolution, ops_combined.tree_conv_silu, *convolution.args)
            output, kept = (emit(graph, convolution, operator.getitem, both, place) for place in (0, 1))
        end.replace_all_uses_with(output)
        copies[0].replace_input_with(_node(copies[0].args[1]), kept)
        joined += 1
    if joined:
        graph.eliminate_dead_code()
        graph.lint()
    return joined


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
