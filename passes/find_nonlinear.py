"""Find where a region is not linear in the state, as every recurrence of this kind is: what a refusal should point at.

    S = S + k (v - S^T k)^T        linear: sums, products with what does not know the state, moves
    S = tanh(S)                    the first node that is not: named in the refusal

This proves nothing; it is asked only about a region that has already disagreed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from treewy_inductor.passes.find_rounding import CASTS, MOVES
from treewy_inductor.passes.propose_region import Region

aten = torch.ops.aten

_SUMS = {aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.add.Scalar, aten.neg.default, aten.where.self}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, aten.bmm.default, aten.mm.default, aten.matmul.default, aten.dot.default}
_REDUCTIONS = {
    aten.linalg_vector_norm.default,
    aten.amax.default,
    aten.amin.default,
    aten.prod.dim_int,
    aten.logsumexp.default,
    aten._softmax.default,
    aten._log_softmax.default,
}


def nonlinear_in_state(region: Region) -> fx.Node | None:
    """Return the first node on the way to the final state that is known not to be linear in the state, none if all may be."""
    of_state = {region.marked.state_in}
    # What follows an output, such as its norm, is no part of the recurrence.
    matters = {region.marked.final_state}
    for node in reversed(region.nodes):
        if node in matters:
            matters.update(node.all_input_nodes)
    for node in region.nodes:
        if node in matters and not of_state.isdisjoint(node.all_input_nodes):
            if _is_nonlinear(node, of_state):
                return node
            of_state.add(node)
    return None


def _is_nonlinear(node: fx.Node, of_state: set[fx.Node]) -> bool:
    target: Any = node.target
    knows = [isinstance(arg, fx.Node) and arg in of_state for arg in node.args]
    if target in _PRODUCTS:
        return sum(knows) > 1
    if target in (aten.div.Tensor, aten.div.Scalar):
        return knows[1]
    if target in _SUMS or target in MOVES or target in CASTS:
        return False
    return torch.Tag.pointwise in getattr(target, "tags", ()) or target in _REDUCTIONS
