"""Sweep the tiles of the tree kernels, each checked against float64 at the very shape it is timed at.

``python -m bench.kernels --tune`` prints one line a tile; only a tile with errors in bounds and the same bits on a second
run may enter ``lowerings/configurations.py``; tests/test_configurations.py holds what is checked here against that table.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from bench.graph_timing import time_calls
from bench.kernel_cases import Shape, accepted_trunk, arguments, copies, float64_results, tree_parents
from bench.planned_commit import STATE_BOUND, PlannedCommit, measure_commit, path_tensor
from bench.planned_verify import Judgement, PlannedVerify
from treewy_inductor.lowerings.configurations import CommitTile, VerifyTile, commit_tile, verify_tile

# Of every size that the kernels and the compiler tell apart: words of 64 nodes, slots, and numbers that 16 divides. Up to 64
# nodes the way also depends on whether more than 16 have children.
SMALL_TREES = ("chain1", "wide13", "chain16")
FEW_INTERNAL = ("leafy24", "leafy32", "leafy40", "leafy48", "leafy60", "leafy64")
MANY_INTERNAL = ("chain24", "chain32", "chain40", "chain48", "chain60", "chain64")
LARGE_TREES = ("wide100", "chain128", "wide150", "chain192", "wide250", "chain256")
CHECKED_TREES = (*SMALL_TREES, *FEW_INTERNAL, *MANY_INTERNAL, *LARGE_TREES)
TRUNK = 16
DIMS = ((128, 128), (64, 64), (96, 192), (256, 256))


def verify_tiles(nodes: int, shape: Shape) -> list[VerifyTile]:
    """Return the tile of the table for ``nodes`` nodes, and others worth trying."""
    chosen = verify_tile(nodes, shape.K, shape.V, shape.dtype == torch.bfloat16)
    choices: list[tuple] = [(64, 4, 32, 2, 2), (64, 4, 32, 2, 2, False), (64, 4, 32, 2, 1), (64, 4, 32, 3, 2)]
    choices += (
        [(64, 4, 32, 2, 2, True, 128), (64, 4, 32, 3, 2, True, None, 2)]
        if nodes <= 16
        else [(64, 4, 32, 2, 2, True, 168), (64, 4, 32, 2, 1, True, 168)]
    )
    tried = [VerifyTile(*choice) for choice in choices if shape.V % choice[0] == 0]
    return [chosen, *(tile for tile in tried if tile != chosen)]


def commit_tiles(V: int) -> list[CommitTile]:
    """Return the tiles worth trying for a commit."""
    return [CommitTile(*choice) for choice in ((64, 4), (32, 4), (64, 8), (16, 4), (128, 8)) if V % choice[0] == 0]


class Check(NamedTuple):
    """A tree and shape at which the table's own tile is checked, with a trunk of ``slots`` above the tree if there are any."""

    tree: str
    shape: Shape
    slots: int = 0


def all_checks() -> list[Check]:
    """Return every size, dims, dtype and trunk that the table and the kernels tell apart."""
    kinds = [(Shape(K=K, V=V, dtype=dtype), 0) for K, V in DIMS for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    kinds += [(Shape(state_dtype=torch.bfloat16), 0), (Shape(), TRUNK)]
    heads = [Check(tree, Shape(groups=groups)) for groups in (1, 3, 4) for tree in ("wide13", "leafy40", "chain40", "wide100")]
    return [Check(tree, *kind) for kind in kinds for tree in CHECKED_TREES] + heads


def compile_tiles(jobs: Iterable[tuple[int, Shape, VerifyTile | None, int]]) -> None:
    """Compile tiles (None: that of the table) side by side, so that the disk cache has them when each is measured alone."""
    distinct = list(dict.fromkeys(jobs))
    with ProcessPoolExecutor(min(len(distinct), 15), multiprocessing.get_context("spawn")) as processes:
        list(processes.map(_compile_tile, distinct))


def _compile_tile(job: tuple[int, Shape, VerifyTile | None, int]) -> None:
    nodes, shape, tile, slots = job
    with contextlib.suppress(OutOfResources):
        case = arguments([*range(-1, nodes - 1)], 2, shape)
        PlannedVerify(case, tile, accepted_trunk(case, 1, slots) if slots else None).run()
        torch.cuda.synchronize()


def describe(tree: str, batch: int, shape: Shape) -> dict[str, Any]:
    """Return what a row says of its case."""
    dtypes = {"dtype": str(shape.dtype).removeprefix("torch."), "state_dtype": str(shape.state_dtype).removeprefix("torch.")}
    heads = {"groups": shape.groups, "K": shape.K, "V": shape.V}
    return {"tree": tree, "nodes": len(tree_parents(tree)), "batch": batch, **heads, **dtypes}


def tune_all(trees: list[str], batches: list[int]) -> Iterator[dict[str, Any]]:
    """Yield one row a tile: kernel, case, tile, errors and whether they are in bounds; microseconds where it was timed."""
    sweeps = [(tree, tile) for tree in trees for tile in verify_tiles(len(tree_parents(tree)), Shape())]
    checks = all_checks()
    jobs = [(len(tree_parents(tree)), Shape(), tile, 0) for tree, tile in sweeps]
    compile_tiles([*jobs, *((len(tree_parents(check.tree)), check.shape, None, check.slots) for check in checks)])
    for check in checks:
        yield check_tile(check)
    for batch in batches:
        for tree in trees:
            yield from tune_verify(tree, batch, Shape())
            yield from tune_commit(tree, batch, Shape())


def check_tile(check: Check, batch: int = 3) -> dict[str, Any]:
    """Return the row of the table's tiles at a shape: a verification, and a commit of its longest path."""
    tree, shape, slots = check
    parents = tree_parents(tree)
    case = arguments(parents, batch, shape)
    trunk = accepted_trunk(case, slots // 2, slots) if slots else ()
    planned = PlannedVerify(case, trunk=trunk or None)
    judgement = planned.judge(float64_results(case, trunk=trunk))
    is_exact = shape.dtype == torch.bfloat16
    tile = verify_tile(len(parents), shape.K, shape.V, is_exact)
    row = {"kernel": "verify", **describe(tree, batch, shape), "trunk": slots, "tile": list(tile), **judged(judgement)}
    commit = PlannedCommit(case, planned, path_tensor(parents, case))
    row |= {"commit_tile": list(commit_tile(shape.K, shape.V, is_exact)), "state_err": commit.judge()}
    # A state in bfloat16 is rounded where it is stored.
    row["is_right"] &= row["state_err"] <= (STATE_BOUND if shape.state_dtype == torch.float32 else 3e-3)
    if not row["is_right"]:
        print(f"wrong: {row}", flush=True)
    return row


def judged(judgement: Judgement) -> dict[str, Any]:
    return {"errors": judgement.errors, "same_bits": judgement.same_bits, "is_right": judgement.is_right, "us": None}


def tune_verify(tree: str, batch: int, shape: Shape) -> Iterator[dict[str, Any]]:
    """Yield one row a tile."""
    parents = tree_parents(tree)
    cases = [arguments(parents, batch, shape, seed) for seed in range(copies(batch, shape))]
    exact = float64_results(cases[0])
    for tile in verify_tiles(len(parents), shape):
        row: dict[str, Any] = {"kernel": "verify", **describe(tree, batch, shape), "tile": list(tile)}
        planned = [PlannedVerify(case, tile) for case in cases]
        try:
            row |= judged(planned[0].judge(exact))
        except OutOfResources as error:
            row |= {"is_right": False, "us": None, "too_large": str(error)}
        if row["is_right"]:
            for each in planned[1:]:
                each.run()
            row["us"] = time_calls([each.run for each in planned], at_least_us=1000.0, replays=7).median
        print(tabulate(row), flush=True)
        yield row


def tune_commit(tree: str, batch: int, shape: Shape) -> Iterator[dict[str, Any]]:
    """Yield one row a tile."""
    parents = tree_parents(tree)
    cases = [arguments(parents, batch, shape, seed) for seed in range(copies(batch, shape))]
    verified = [PlannedVerify(case) for case in cases]
    for each in verified:
        each.run()
    for tile in commit_tiles(shape.V):
        found = measure_commit(parents, cases, verified, tile)
        row = {"kernel": "commit", **describe(tree, batch, shape), "tile": list(tile), "errors": [found["state_err"]]}
        row |= {"is_right": found["commit_right"], "us": found.get("commit_us")}
        print(tabulate(row), flush=True)
        yield row


def tabulate(row: dict[str, Any]) -> str:
    """Return one line of a row."""
    line = f"{row['kernel']:>6} {row['tree']:>8} {row['batch']:>4} {tuple(row['tile'])!s:>34} "
    if "too_large" in row:
        return line + f"too large: {row['too_large']}"
    line += f"{row['us']:8.2f} us" if row["is_right"] else "wrong"
    line += " errors " + " ".join(f"{error:.1e}" for error in row["errors"])
    return line if row.get("same_bits", True) else line + " bits move"
