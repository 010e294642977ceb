"""Check the table's tiles of the tree kernels at every shape against float64, then sweep others, each checked and timed.

``python -m bench.kernels --tune`` prints a line a tile that it timed, and one a shape at which the table's is wrong. Only a
tile with errors in bounds and the same bits on a second run may enter ``lowerings/configurations.py``. A row says as what it
ran: kernel, warps and the constants that a tile decides.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from bench.checked_shapes import Check, all_checks, fused_checks
from bench.graph_timing import time_calls
from bench.kernel_cases import Shape, accepted_trunk, arguments, copies, float64_results, tree_parents
from bench.planned_commit import PlannedCommit, longest_path, measure_commit, path_tensor, state_bound
from bench.planned_fused import SLOTS, PlannedFused
from bench.planned_verify import PlannedVerify, ran_as
from treewy_inductor.lowerings.configurations import CommitTile, VerifyTile

# Nodes, rows, shape, and a tile or None for that of the table.
Job = tuple[int, int, Shape, VerifyTile | None]


def verify_tiles(nodes: int, shape: Shape) -> list[VerifyTile | None]:
    """Return None, which is the tile of the table for ``nodes`` nodes, and others worth trying."""
    choices: list[tuple] = [(64, 4, 32, 2, 2), (64, 4, 32, 2, 2, False), (64, 4, 32, 2, 1), (64, 4, 32, 3, 2)]
    choices += (
        [(64, 4, 32, 2, 2, True, 128), (64, 4, 32, 3, 2, True, None, 2)]
        if nodes <= 16
        else [(64, 4, 32, 2, 2, True, 168), (64, 4, 32, 2, 1, True, 168)]
    )
    return [None, *(VerifyTile(*choice) for choice in choices if shape.V % choice[0] == 0)]


def commit_tiles(V: int) -> list[CommitTile]:
    """Return the tiles worth trying for a commit."""
    return [CommitTile(*choice) for choice in ((64, 4), (32, 4), (64, 8), (16, 4), (128, 8)) if V % choice[0] == 0]


def processes(tasks: int) -> ProcessPoolExecutor:
    """Return processes that compile side by side; only timing needs the machine for itself."""
    # A check may hold 12 GB for a moment, and one device is all that they have.
    most = max(1, min(12, len(os.sched_getaffinity(0)) - 1))
    return ProcessPoolExecutor(min(tasks, most), multiprocessing.get_context("spawn"))


def compile_tiles(jobs: Iterable[Job]) -> None:
    """Compile tiles side by side, so that the disk cache has them when each is measured alone."""
    distinct = list(dict.fromkeys(jobs))
    with processes(len(distinct)) as pool:
        list(pool.map(_compile_tile, distinct))


def _compile_tile(job: Job) -> None:
    nodes, batch, shape, tile = job
    with contextlib.suppress(OutOfResources):
        PlannedVerify(arguments([*range(-1, nodes - 1)], batch, shape), tile).run()
        torch.cuda.synchronize()


def describe(tree: str, batch: int, shape: Shape) -> dict[str, Any]:
    """Return what a row says of its case."""
    dtypes = {"dtype": str(shape.dtype).removeprefix("torch."), "state_dtype": str(shape.state_dtype).removeprefix("torch.")}
    heads = {"groups": shape.groups, "K": shape.K, "V": shape.V}
    return {"tree": tree, "nodes": len(tree_parents(tree)), "batch": batch, **heads, **dtypes}


def tune_all(trees: list[str], batches: list[int]) -> Iterator[dict[str, Any]]:
    """Yield one row a check or tile: kernel, case, errors and whether they are in bounds; microseconds where it was timed."""
    shape = Shape()
    sweeps = [(tree, batch) for batch in batches for tree in trees]
    with processes(len(all_checks())) as pool:
        yield from told(pool.map(check_tile, all_checks()))
        yield from told(pool.map(check_fused, fused_checks()))
        jobs = [(tree, batch, tile) for tree, batch in sweeps for tile in verify_tiles(len(tree_parents(tree)), shape)]
        list(pool.map(_compile_tile, [(len(tree_parents(tree)), batch, shape, tile) for tree, batch, tile in jobs]))
    for tree, batch in sweeps:
        yield from tune_verify(tree, batch, shape)
        yield from tune_commit(tree, batch, shape)
        torch.cuda.empty_cache()


def told(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield ``rows``; print those that are wrong, then how many were right."""
    right = seen = 0
    for row in rows:
        seen, right = seen + 1, right + row["is_right"]
        if not row["is_right"]:
            print(f"wrong: {row}", flush=True)
        yield row
    print(f"{row['kernel']}: {right} of {seen} shapes right with the table's tiles", flush=True)


def check_tile(check: Check) -> dict[str, Any]:
    """Return the row of the table's tiles at a shape: a verification, and a commit of its longest path."""
    tree, shape, slots, batch = check
    parents = tree_parents(tree)
    # The checks beside this one need what the one before it held.
    torch.cuda.empty_cache()
    row = {"kernel": "verify", **describe(tree, batch, shape), "trunk": slots}
    case = arguments(parents, batch, shape)
    trunk = accepted_trunk(case, slots // 2, slots) if slots else None
    planned = PlannedVerify(case, trunk=trunk)
    commit = PlannedCommit(case, planned, path_tensor(parents, case))
    row |= {"ran_as": ran_as(planned.launches), "commit_ran_as": ran_as(commit.launches)}
    try:
        judgement = planned.judge(float64_results(case, trunk=trunk or ()))
        row |= {
            "errors": rounded(judgement.errors),
            "same_bits": judgement.same_bits,
            "state_err": rounded([commit.judge()])[0],
        }
    except OutOfResources as error:
        return row | {"is_right": False, "too_large": str(error)}
    return row | {"is_right": judgement.is_right and row["state_err"] <= state_bound(shape.state_dtype)}


def check_fused(check: Check) -> dict[str, Any]:
    """Return the row of the table's tile at a shape of a commit fused with the next verification."""
    tree, shape, _, batch = check
    parents = tree_parents(tree)
    torch.cuda.empty_cache()
    planned = PlannedFused(arguments(parents, batch, shape), min(len(longest_path(parents)), SLOTS))
    row = {"kernel": "fused", **describe(tree, batch, shape), "trunk": SLOTS, "ran_as": ran_as(planned.launches)}
    try:
        errors = planned.judge()
    except OutOfResources as error:
        return row | {"is_right": False, "too_large": str(error)}
    return row | {"errors": rounded(errors), "is_right": planned.is_right(errors)}


def rounded(errors: list[float]) -> list[float]:
    """Return ``errors`` with two digits: a thousand rows are kept."""
    return [float(f"{error:.1e}") for error in errors]


def tune_verify(tree: str, batch: int, shape: Shape) -> Iterator[dict[str, Any]]:
    """Yield one row a tile, the first that of the table; what another runs as as well comes once."""
    parents = tree_parents(tree)
    cases = [arguments(parents, batch, shape, seed) for seed in range(copies(batch, shape))]
    exact = float64_results(cases[0])
    seen = []
    for tile in verify_tiles(len(parents), shape):
        planned = [PlannedVerify(case, tile) for case in cases]
        row: dict[str, Any] = {"kernel": "verify", **describe(tree, batch, shape), "ran_as": ran_as(planned[0].launches)}
        if row["ran_as"] in seen:
            continue
        seen.append(row["ran_as"])
        try:
            judgement = planned[0].judge(exact)
            row |= {"errors": judgement.errors, "same_bits": judgement.same_bits, "is_right": judgement.is_right, "us": None}
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
        ran = f"{tile.warps} warps BLOCK_V {tile.block_v}"
        row = {"kernel": "commit", **describe(tree, batch, shape), "ran_as": [ran], "errors": [found["state_err"]]}
        row |= {"is_right": found["commit_right"], "us": found.get("commit_us")}
        print(tabulate(row), flush=True)
        yield row


def tabulate(row: dict[str, Any]) -> str:
    """Return one line of a row."""
    line = f"{row['kernel']:>6} {row['tree']:>8} {row['batch']:>4} {row['ran_as'][0]:>80} "
    if "too_large" in row:
        return line + f"too large: {row['too_large']}"
    line += f"{row['us']:8.2f} us" if row["is_right"] else "wrong"
    line += " errors " + " ".join(f"{error:.1e}" for error in row["errors"])
    return line if row.get("same_bits", True) else line + " bits move"
