"""A commit fused with the next verification, judged against float64 and timed: one read and one write of the states a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.graph_timing import time_calls
from bench.kernel_cases import accepted_trunk, in_float64, relative_error
from bench.planned_commit import STATE_BOUND, longest_path
from bench.planned_verify import BOUND, OUTPUT_BOUNDS
from treewy_inductor import ops_fused, reference_fused

# As many as :mod:`treewy_inductor.deferred_states` gives a trunk that is folded at the next verification.
SLOTS = 16


class PlannedFused:
    """Folds ``length`` accepted nodes into the state of ``case`` and verifies against it; the trunk stays as it is."""

    def __init__(self, case: tuple, length: int) -> None:
        self.case, self.trunk = case, accepted_trunk(case, length, SLOTS)

    def run(self) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = ops_fused.tree_gated_delta_fused(*self.case[:10], *self.trunk, *self.case[10:])
        return results

    def judge(self) -> list[float]:
        """Run once; return the relative errors of output, pseudo-values, path decays, key scales and of the states."""
        exact = self._exact()
        return [relative_error(result, x) for result, x in zip((*self.run(), self.case[5]), exact, strict=True)]

    def _exact(self) -> tuple[Tensor, ...]:
        """Return results and states by the reference in float64."""

        def compute(*wide: Tensor) -> tuple[Tensor, ...]:
            return *reference_fused.tree_gated_delta_fused(*wide, *self.case[10:12], torch.float64), wide[5]

        return in_float64(compute, [*self.case[:10], *self.trunk])


def measure_fused(parents: list[int], cases: list[tuple]) -> dict[str, Any]:
    """Return the errors of a fused step after a path as long as the tree's longest and, if it is right, its time.

    Nothing where the op has no kernel: the reference's time says nothing.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key("treewy::tree_gated_delta_fused", "CUDA"):
        return {}
    planned = [PlannedFused(case, len(longest_path(parents))) for case in cases]
    errors = planned[0].judge()
    bounds = (OUTPUT_BOUNDS[cases[0][12]], BOUND, BOUND, BOUND, STATE_BOUND)
    row: dict[str, Any] = dict(zip(("fused_o_err", "fused_u_err"), errors, strict=False)) | {"fused_state_err": errors[4]}
    row["fused_right"] = all(error <= bound for error, bound in zip(errors, bounds, strict=True))
    if row["fused_right"]:
        row["fused_us"] = time_calls([each.run for each in planned]).median
    return row
