"""A commit of the longest path after a verification, judged against float64 and timed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.graph_timing import time_calls
from bench.kernel_cases import in_float64, relative_error
from bench.planned_verify import CollectingLauncher, PlannedVerify, run
from treewy_inductor import reference
from treewy_inductor.lowerings.commit_state import launch_commit_state
from treewy_inductor.lowerings.configurations import CommitTile
from treewy_inductor.tree import DraftTree

STATE_BOUND = 1e-5
# Of a state that is rounded to bfloat16 where it is stored, and of what is computed from it.
_ROUNDED = 3e-3


def state_bound(dtype: torch.dtype) -> float:
    """Return the bound of the relative error of states that are stored as ``dtype``."""
    return STATE_BOUND if dtype == torch.float32 else _ROUNDED


def longest_path(parents: list[int]) -> list[int]:
    """Return the nodes from the root to the deepest node."""
    tree = DraftTree.from_parents(parents)
    return tree.path_to(max(range(len(tree)), key=tree.depths.__getitem__))


def path_tensor(parents: list[int], case: tuple) -> Tensor:
    """Return the longest path for every row of ``case``, ``[B, N]`` int32, padded with -1."""
    nodes = longest_path(parents)
    key = case[1]
    path = torch.full((key.shape[0], len(parents)), -1, dtype=torch.int32, device=key.device)
    path[:, : len(nodes)] = torch.tensor(nodes, device=key.device)
    return path


class PlannedCommit:
    """Overwrites the state of ``case`` by that of the last node of ``path``, as one layer of a cache."""

    def __init__(self, case: tuple, verified: PlannedVerify, path: Tensor, tile: CommitTile | None = None) -> None:
        _, pseudo_values, path_decay, key_scale = verified.results
        self.stacked = [x[None] for x in (case[5], case[1], key_scale, pseudo_values, path_decay)]
        self.path = path
        launcher = CollectingLauncher()
        launch_commit_state(launcher, *self.stacked, path, tile=tile)
        self.launches = launcher.launches
        self.run = run(self.launches)

    def judge(self) -> float:
        """Run once and return the relative error of the states."""
        exact = self._exact()
        self.run()
        return relative_error(self.stacked[0][0], exact)

    def _exact(self) -> Tensor:
        """Return the states ``[B, HV, K, V]`` by the reference in float64."""

        def compute(*wide: Tensor) -> list[Tensor]:
            reference.commit_state(*(x[None] for x in wide[:-1]), wide[-1])
            return [wide[0]]

        return in_float64(compute, [*(x[0] for x in self.stacked), self.path])[0]


def measure_commit(
    parents: list[int], cases: list[tuple], verified: list[PlannedVerify], tile: CommitTile | None = None
) -> dict[str, Any]:
    """Return the error of a commit in float64's eyes and, if it is right, its time."""
    path = path_tensor(parents, cases[0])
    planned = [PlannedCommit(case, each, path, tile) for case, each in zip(cases, verified, strict=True)]
    error = planned[0].judge()
    row: dict[str, Any] = {"state_err": error, "commit_right": error <= STATE_BOUND}
    if row["commit_right"]:
        row["commit_us"] = time_calls([each.run for each in planned]).median
    return row
