"""One verification as the launches that it is made of: run, judged against float64, and timed without a host in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bench.kernel_cases import relative_error
from treewy_inductor.lowerings.configurations import VerifyTile
from treewy_inductor.lowerings.launch import EAGER, EagerLauncher, Launch
from treewy_inductor.lowerings.tree_gated_delta import launch_tree_gated_delta

# Of outputs, by how they are stored; sums in float32 over the ancestors of a deep node lose what cancels.
OUTPUT_BOUNDS = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-5}
# Of pseudo-values, path decays, key scales.
BOUND = 1e-6
# Constants that a tile of the table decides, or that decide which way a tree goes.
OF_TILES = ("SLOTS", "HEADS", "PARTS", "BLOCK_V", "STREAM", "STAGES", "IS_FETCHED")


class CollectingLauncher(EagerLauncher):
    """Keeps the launches instead of running them, so that each can be run and timed alone."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch)


class Judgement(NamedTuple):
    """Errors of output, pseudo-values, path decays, key scales, the worse of two runs each; whether those were equal."""

    errors: list[float]
    same_bits: bool
    is_right: bool


def run(launches: list[Launch]) -> Callable[[], None]:
    """Return a call that runs ``launches`` in order."""

    def call() -> None:
        for launch in launches:
            EAGER.launch(launch)

    return call


def ran_as(launches: list[Launch]) -> list[str]:
    """Return a line a launch: its kernel, warps, limit of registers if any, and the constants that a tile decides."""
    lines = []
    for launch in launches:
        options = f"{launch.warps} warps" + ("" if launch.registers is None else f" of {launch.registers} registers")
        constants = " ".join(f"{name} {launch.constants[name]}" for name in OF_TILES if name in launch.constants)
        lines.append(f"{launch.kernel.fn.__name__.removesuffix('_kernel')}, {options}, {constants}")
    return lines


class PlannedVerify:
    """What verifies ``case``, arguments as :mod:`bench.kernel_cases` makes them, with the tile of the table or another.

    ``trunk``: five tensors that the tree hangs from, as :mod:`treewy_inductor.ops_replay` says, or none.

    Attributes:
        launches: in the order in which they run.
        results: output, pseudo-values, path decays and key scales.
    """

    def __init__(self, case: tuple, tile: VerifyTile | None = None, trunk: tuple[Tensor, ...] | None = None) -> None:
        launcher = CollectingLauncher()
        launched = launch_tree_gated_delta(launcher, *case, verify=tile, trunk=trunk)
        self.results: list[Tensor] = [result.handle for result in launched]
        self.launches = launcher.launches
        self.run = run(self.launches)

    def judge(self, exact: tuple[Tensor, ...]) -> Judgement:
        """Run twice, each time over results full of NaN, and compare with the ``exact`` results and one another."""
        errors, first, same = [0.0] * len(exact), None, True
        for _ in range(2):
            for result in self.results:
                result.fill_(torch.nan)
            self.run()
            # A NaN stays: no comparison with it holds.
            found = [relative_error(result, x) for result, x in zip(self.results, exact, strict=True)]
            errors = [a if b <= a else b for a, b in zip(errors, found, strict=True)]
            if first is not None:
                same = all(map(torch.equal, first, self.results))
            first = [result.clone() for result in self.results]
        in_bounds = errors[0] <= OUTPUT_BOUNDS[self.results[0].dtype] and all(error <= BOUND for error in errors[1:])
        return Judgement(errors, same, same and in_bounds)
