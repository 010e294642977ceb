"""The kernels of every commit policy on a GPU: a dozen steps of verify and commit against the reference in float64."""

from __future__ import annotations

import pytest

from bench.policies import OUTPUT_BOUND, STATE_BOUND
from bench.policy_steps import worst_errors
from treewy_inductor.layer_shapes import LinearShape
from treewy_inductor.lowerings.register import register_lowerings
from treewy_inductor.model_shapes import gated_delta
from treewy_inductor.tree import DraftTree

pytestmark = pytest.mark.gpu

SHAPES = {
    "35b": gated_delta(4, 8),
    "olmo": gated_delta(3, 3, 96, 192),
    "three value heads a key head": gated_delta(2, 6),
}


@pytest.mark.parametrize(
    ("policy", "flush_every"),
    [("store_all", None), ("reconstruct", None), ("replay", 3), ("replay", 24), ("fused", None)],
)
@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2, 2), (3, 3, 3), (1,) * 19], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_outputs_and_states(shape: LinearShape, widths: tuple[int, ...], policy: str, flush_every: int | None) -> None:
    register_lowerings()
    output_error, state_error = worst_errors(policy, flush_every, shape, DraftTree.from_widths(widths))
    assert output_error <= OUTPUT_BOUND
    assert state_error <= STATE_BOUND
