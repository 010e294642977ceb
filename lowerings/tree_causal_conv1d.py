"""Lower treewy::tree_causal_conv1d to an elementwise loop, so that Inductor fuses it with what comes before and after.

    y[t] = bias + sum over j of weight[K-1-j] x[j-th ancestor of t]        above the root: history[K + window]

One element reads K inputs through the tree's window and is computed in float32. Channels are innermost, as the op's fake
kernel says: neighbouring elements then read neighbouring addresses whatever the tree is.

    B batch   C channels   N nodes   K kernel and history columns
"""

from __future__ import annotations

from typing import Any

import torch

from treewy_inductor import compat, ops


def lower_tree_causal_conv1d(inputs: Any, history: Any, weight: Any, bias: Any, window: Any) -> Any:
    """Return ``[B, C, N]`` of the inputs' dtype as an elementwise loop over ``[B, N, C]``."""
    if torch.float64 in (inputs.get_dtype(), weight.get_dtype()):
        return compat.call_in_graph(ops.tree_causal_conv1d)(inputs, history, weight, bias, window)
    # Each input is read by up to K elements: what it is computed from must not be computed K times.
    inputs.realize()
    B, C, N = inputs.get_size()
    K = int(weight.get_size()[1])
    x, past, w, ancestor = (value.make_loader() for value in (inputs, history, weight, window))
    shift = None if bias is None else bias.make_loader()

    def element(op: Any, index: Any) -> Any:
        b, t, c = index

        def number(value: Any) -> Any:
            return op.to_dtype(value, torch.float32)

        def at(value: Any, size: Any) -> Any:
            # Both sides of the choice below are read, so the one that does not apply must stay inside.
            low, high = op.constant(0, torch.int32), op.index_expr(size - 1, torch.int32)
            return op.indirect_indexing(op.minimum(op.maximum(value, low), high), size, check=False, wrap_neg=False)

        total = op.mul(number(w([c, K - 1])), number(x([b, c, t])))
        for j in range(1, K):
            node = ancestor([b, t, j - 1])
            above = op.lt(node, op.constant(0, torch.int32))
            column = op.add(node, op.constant(K, torch.int32))
            seen = op.where(above, number(past([b, c, at(column, K)])), number(x([b, c, at(node, N)])))
            total = op.add(total, op.mul(number(w([c, K - 1 - j])), seen))
        if shift is not None:
            total = op.add(total, number(shift([c])))
        if K > 1:
            is_node = op.gt(ancestor([b, t, 0]), op.constant(-(2**30), torch.int32))
            total = op.where(is_node, total, op.constant(0.0, torch.float32))
        return op.to_dtype(total, inputs.get_dtype())

    return compat.permute_in_graph(compat.pointwise_in_graph(inputs, inputs.get_dtype(), (B, N, C), element), (0, 2, 1))
