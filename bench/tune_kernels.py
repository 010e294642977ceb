"""Sweep the tiles of the tree kernels, each checked against float64 at the very shape it is timed at.

``python -m bench.kernels --tune`` prints one line a tile; only a tile with errors in bounds and the same bits on a second
run may enter ``lowerings/configurations.py``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from bench.graph_timing import time_calls
from bench.kernel_cases import Shape, arguments, copies, float64_results, relative_error, tree_parents
from treewy_inductor.lowerings.configurations import CommitTile, VerifyTile
from treewy_inductor.lowerings.launch import EAGER, EagerLauncher, Launch
from treewy_inductor.lowerings.tree_gated_delta import launch_tree_gated_delta

# Of output (stored in bfloat16), pseudo-values, path decays, key scales.
BOUNDS = (3e-3, 1e-6, 1e-6, 1e-6)


class CollectingLauncher(EagerLauncher):
    """Keeps the launches instead of running them, so that each can be run and timed alone."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch)


def verify_tiles(nodes: int, V: int) -> list[VerifyTile]:
    """Return the tiles worth trying for ``nodes`` nodes."""
    choices: list[tuple] = [(64, 4, 32, 2, 2), (64, 4, 32, 2, 2, False), (64, 4, 32, 2, 1), (64, 4, 32, 3, 2)]
    choices += [(64, 4, 32, 2, 2, True, 128)] if nodes <= 16 else [(64, 4, 32, 2, 2, True, 168), (64, 4, 32, 2, 1, True, 168)]
    return [VerifyTile(*choice) for choice in choices if V % choice[0] == 0]


def commit_tiles(V: int) -> list[CommitTile]:
    """Return the tiles worth trying for a commit."""
    return [CommitTile(*choice) for choice in ((64, 4), (32, 4), (64, 8), (16, 4), (128, 8)) if V % choice[0] == 0]


def compile_tiles(nodes: int, shape: Shape) -> None:
    """Compile the tiles for ``nodes`` nodes side by side, so that the disk cache has them when each is measured alone."""
    tiles = verify_tiles(nodes, shape.V)
    with ProcessPoolExecutor(min(len(tiles), 12), multiprocessing.get_context("spawn")) as processes:
        list(processes.map(_compile_tile, [(nodes, shape, tile) for tile in tiles]))


def _compile_tile(job: tuple[int, Shape, VerifyTile]) -> None:
    nodes, shape, tile = job
    with contextlib.suppress(OutOfResources):
        launch_tree_gated_delta(EAGER, *arguments([*range(-1, nodes - 1)], 2, shape), verify=tile)
        torch.cuda.synchronize()


def run(launches: list[Launch]) -> Callable[[], None]:
    """Return a call that runs ``launches`` in order."""

    def call() -> None:
        for launch in launches:
            EAGER.launch(launch)

    return call


def _judge(results: tuple, exact: tuple, call: Callable[[], None]) -> tuple[list[float], bool]:
    """Return the errors of two runs' results (the larger each) and whether both runs gave the same bits."""
    first: list[torch.Tensor] = []
    errors = [0.0] * len(exact)
    same = True
    for _ in range(2):
        for result in results:
            result.handle.fill_(torch.nan)
        call()
        errors = [max(e, relative_error(r.handle, x), key=_nan_last) for e, r, x in zip(errors, results, exact, strict=True)]
        if first:
            same = all(torch.equal(a, r.handle) for a, r in zip(first, results, strict=True))
        else:
            first = [r.handle.clone() for r in results]
    return errors, same


def _nan_last(error: float) -> float:
    return error if error == error else float("inf")


def tune(tree: str, batch: int, shape: Shape, say: Callable[[str], object] = print) -> list[dict[str, Any]]:
    """Return one row a tile: which kernel, tile, errors, microseconds (None where wrong or too large for the chip)."""
    parents = tree_parents(tree)
    compile_tiles(len(parents), shape)
    sets = [arguments(parents, batch, shape, seed) for seed in range(copies(batch, shape))]
    exact = float64_results(sets[0])
    rows: list[dict[str, Any]] = []
    for tile in verify_tiles(len(parents), shape.V):
        row: dict[str, Any] = {"tree": tree, "batch": batch, "kernel": "verify", "tile": list(tile), "us": None}
        rows.append(row)
        planned = []
        for case in sets:
            launcher = CollectingLauncher()
            results = launch_tree_gated_delta(launcher, *case, verify=tile)
            planned.append((launcher.launches, results))
        try:
            errors, same = _judge(planned[0][1], exact, run(planned[0][0]))
        except OutOfResources as error:
            say(f"{tree:>8} {batch:>4} {tuple(tile)!s:>26} too large: {error}")
            continue
        row |= {"errors": errors, "same_bits": same}
        right = same and all(e <= bound for e, bound in zip(errors, BOUNDS, strict=True))
        if right:
            for launches, _ in planned[1:]:
                run(launches)()
            row["us"] = time_calls([run(launches) for launches, _ in planned]).median
        shown = f"{row['us']:8.2f} us" if right else "   wrong"
        figures = " ".join(f"{e:.1e}" for e in errors)
        say(f"{tree:>8} {batch:>4} {tuple(tile)!s:>26} {shown}  errors {figures}{'' if same else '  bits move'}")
    return rows
