"""A commit fused with the next verification, judged against float64 and timed: one read and one write of the states a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.graph_timing import time_calls
from bench.kernel_cases import accepted_trunk, in_float64, relative_error
from bench.planned_commit import longest_path, state_bound
from bench.planned_verify import BOUND, OUTPUT_BOUNDS, CollectingLauncher, run
from treewy_inductor import reference_fused
from treewy_inductor.lowerings.tree_gated_delta_fused import launch_tree_gated_delta_fused

# As many as :mod:`treewy_inductor.deferred_states` gives a trunk that is folded at the next verification.
SLOTS = 16


class PlannedFused:
    """Folds ``length`` accepted nodes into the state of ``case`` and verifies against it; the trunk stays as it is.

    Attributes:
        launches: in the order in which they run.
        results: output, pseudo-values, path decays and key scales.
    """

    def __init__(self, case: tuple, length: int) -> None:
        self.case, self.trunk = case, accepted_trunk(case, length, SLOTS)
        launcher = CollectingLauncher()
        launched = launch_tree_gated_delta_fused(launcher, *case[:10], *self.trunk, *case[10:])
        self.results: list[Tensor] = [result.handle for result in launched]
        self.launches = launcher.launches
        self.run = run(self.launches)

    def judge(self) -> list[float]:
        """Run once; return the relative errors of output, pseudo-values, path decays, key scales and of the states."""
        exact = self._exact()
        self.run()
        return [relative_error(result, x) for result, x in zip((*self.results, self.case[5]), exact, strict=True)]

    def is_right(self, errors: list[float]) -> bool:
        """Say whether ``errors`` are in the bounds of a verification and of a commit."""
        dtype = self.case[5].dtype
        # Pseudo-values come of states that the same launch has stored.
        of_values = BOUND if dtype == torch.float32 else state_bound(dtype)
        bounds = (OUTPUT_BOUNDS[self.case[12]], of_values, BOUND, BOUND, state_bound(dtype))
        return all(error <= bound for error, bound in zip(errors, bounds, strict=True))

    def _exact(self) -> tuple[Tensor, ...]:
        """Return results and states by the reference in float64."""

        def compute(*wide: Tensor) -> tuple[Tensor, ...]:
            return *reference_fused.tree_gated_delta_fused(*wide, *self.case[10:12], torch.float64), wide[5]

        return in_float64(compute, [*self.case[:10], *self.trunk])


def measure_fused(parents: list[int], cases: list[tuple]) -> dict[str, Any]:
    """Return the errors of a fused step after a path as long as the tree's longest and, if it is right, its time."""
    planned = [PlannedFused(case, len(longest_path(parents))) for case in cases]
    errors = planned[0].judge()
    row: dict[str, Any] = dict(zip(("fused_o_err", "fused_u_err"), errors, strict=False)) | {"fused_state_err": errors[4]}
    row["fused_right"] = planned[0].is_right(errors)
    if row["fused_right"]:
        row["fused_us"] = time_calls([each.run for each in planned]).median
    return row
