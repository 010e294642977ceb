"""How fast is a tree verified, beside one read of the states and beside one full state a node?

``python -m bench.kernels`` prints a row a (tree, batch): the measured read floor, our verify, per-node snapshots, our commit,
and the errors against float64, without which no time is printed. ``--tune`` sweeps tiles instead (bench/tune_kernels.py).
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from bench.graph_timing import time_calls, time_copy, time_read
from bench.kernel_cases import Shape, arguments, copies, float64_results, relative_error, tree_parents
from bench.machine import machine_name, measured_commit
from bench.snapshots_kernel import plan_snapshots
from bench.tune_kernels import BOUNDS, CollectingLauncher, commit_tiles, run, tune
from treewy_inductor import reference
from treewy_inductor.lowerings.commit_state import launch_commit_state
from treewy_inductor.lowerings.tree_gated_delta import launch_tree_gated_delta
from treewy_inductor.tree import DraftTree

RESULTS = Path(__file__).parent / "results"
SNAPSHOT_TILES = ((32, 1), (32, 4), (64, 4), (16, 1))


def machine() -> dict[str, str]:
    """Return what the figures depend on."""
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {"machine": machine_name(), **versions, "commit": measured_commit()}


def longest_path(parents: list[int]) -> list[int]:
    """Return the nodes from the root to the deepest node."""
    tree = DraftTree.from_parents(parents)
    return tree.path_to(max(range(len(tree)), key=tree.depths.__getitem__))


def measure_verify(parents: list[int], batch: int, shape: Shape) -> dict[str, Any]:
    """Return times of verify, of the read floor and of a copy, and the errors."""
    sets = [arguments(parents, batch, shape, seed) for seed in range(copies(batch, shape))]
    planned = []
    for case in sets:
        launcher = CollectingLauncher()
        results = launch_tree_gated_delta(launcher, *case)
        planned.append((launcher.launches, results))
        for result in results:
            result.handle.fill_(torch.nan)
        run(launcher.launches)()
    errors = [relative_error(r.handle, x) for r, x in zip(planned[0][1], float64_results(sets[0]), strict=True)]
    row: dict[str, Any] = dict(zip(("o_err", "u_err", "g_err", "scale_err"), errors, strict=True))
    first = [r.handle.clone() for r in planned[0][1]]
    for result in planned[0][1]:
        result.handle.fill_(torch.nan)
    run(planned[0][0])()
    row["same_bits"] = all(torch.equal(a, r.handle) for a, r in zip(first, planned[0][1], strict=True))
    row["right"] = row["same_bits"] and all(error <= bound for error, bound in zip(errors, BOUNDS, strict=True))
    if not row["right"]:
        return row
    stored = [case[5].transpose(2, 3) for case in sets]
    row["read_us"], row["copy_us"] = time_read(stored).median, time_copy(stored).median
    verify = time_calls([run(launches) for launches, _ in planned])
    row |= {"verify_us": verify.median, "verify_p10": verify.p10, "verify_p90": verify.p90}
    row["verify_over_read"] = row["verify_us"] / row["read_us"]
    row |= measure_commit(parents, sets, planned, row["copy_us"])
    return row


def measure_commit(parents: list[int], sets: list[tuple], planned: list, copy_us: float) -> dict[str, Any]:
    """Return the time and the error of committing the longest path of each copy."""
    path_nodes = longest_path(parents)
    batch = sets[0][0].shape[0]
    path = torch.full((batch, len(parents)), -1, dtype=torch.int32, device="cuda")
    path[:, : len(path_nodes)] = torch.tensor(path_nodes, device="cuda")
    row: dict[str, Any] = {"commit_right": False}
    for tile in commit_tiles(sets[0][5].shape[3]):
        launches = []
        for case, (_, results) in zip(sets, planned, strict=True):
            tensors = [case[5], case[1], results[3].handle, results[1].handle, results[2].handle]
            stacked = [x[None] for x in tensors]
            launcher = CollectingLauncher()
            launch_commit_state(launcher, *stacked, path, tile=tile)
            launches.append(launcher.launches)
        stacked = [x[None] for x in (sets[0][5], sets[0][1], *(planned[0][1][i].handle for i in (3, 1, 2)))]
        exact = float64_commit(stacked, path)
        run(launches[0])()
        error = relative_error(sets[0][5], exact)
        if error > 1e-5:
            continue
        us = time_calls([run(each) for each in launches]).median
        if not row["commit_right"] or us < row["commit_us"]:
            row |= {"commit_right": True, "state_err": error, "commit_us": us, "commit_tile": list(tile)}
        row.setdefault("commit_tiles", {})[str(tuple(tile))] = round(us, 1)
    if row["commit_right"]:
        row["commit_over_readwrite"] = row["commit_us"] / copy_us
    return row


def float64_commit(stacked: list[Tensor], path: Tensor, rows: int = 16) -> Tensor:
    """Return the committed states ``[B, HV, K, V]`` by the reference in float64, ``rows`` batch rows at a time."""
    parts = []
    for start in range(0, path.shape[0], rows):
        wide = [x[:, start : start + rows].double() for x in stacked]
        reference.commit_state(*wide, path[start : start + rows])
        parts.append(wide[0][0])
    return torch.cat(parts)


def measure_snapshots(parents: list[int], batch: int, shape: Shape) -> float | None:
    """Return the best time of the per-node snapshot kernel, none if its snapshots do not fit the memory or it is wrong."""
    nodes = len(parents)
    needed = batch * nodes * shape.HV * shape.K * shape.V * 4
    if needed > 0.6 * torch.cuda.mem_get_info()[0]:
        return None
    case = arguments(parents, batch, shape)
    links = torch.tensor(parents, dtype=torch.int32, device="cuda").expand(batch, -1).contiguous()
    snapshots = torch.empty(batch, nodes, shape.HV, shape.V, shape.K, device="cuda")
    exact = float64_results(case)[0]
    best = None
    for block_v, warps in SNAPSHOT_TILES:
        call, output = plan_snapshots(case, links, snapshots, block_v, warps)
        call()
        if relative_error(output, exact) > BOUNDS[0]:
            continue
        us = time_calls([call], replays=5).median
        best = us if best is None else min(best, us)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", default="chain4,w222,w333")
    parser.add_argument("--batches", default="8,128")
    parser.add_argument("--tune", action="store_true", help="sweep tiles, each checked at its own shape")
    parser.add_argument("--no-snapshots", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    about = machine()
    print(" | ".join(about.values()) + " | bf16, float32 state, heads 16/32, dims 128/128")
    rows: list[dict[str, Any]] = []
    options.out.mkdir(parents=True, exist_ok=True)
    name = "kernels_tune.json" if options.tune else "kernels.json"
    for tree in options.trees.split(","):
        for batch in map(int, options.batches.split(",")):
            if options.tune:
                rows += tune(tree, batch, Shape())
            else:
                parents = tree_parents(tree)
                row = {"tree": tree, "nodes": len(parents), "batch": batch, **measure_verify(parents, batch, Shape())}
                gc.collect()
                torch.cuda.empty_cache()
                if row["right"] and not options.no_snapshots:
                    row["snapshots_us"] = measure_snapshots(parents, batch, Shape())
                    if row["snapshots_us"]:
                        row["snapshots_over_verify"] = row["snapshots_us"] / row["verify_us"]
                rows.append(row)
                print(tabulate(row), flush=True)
            # Kept as they come: whatever ends a run early leaves what it measured.
            (options.out / name).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
            gc.collect()
            torch.cuda.empty_cache()
    print(json.dumps({**about, "rows": rows}))


def tabulate(row: dict[str, Any]) -> str:
    """Return one line of a row, times in microseconds; the header is in the labels."""
    if not row["right"]:
        moving = "" if row["same_bits"] else ", bits move"
        return f"{row['tree']:>8} {row['batch']:>4} wrong{moving}: u {row['u_err']:.1e} o {row['o_err']:.1e}"
    line = (
        f"{row['tree']:>8} {row['batch']:>4} read {row['read_us']:7.1f} verify {row['verify_us']:7.1f} "
        f"({row['verify_p10']:.1f}-{row['verify_p90']:.1f}) x{row['verify_over_read']:.2f}"
        f" u {row['u_err']:.0e} o {row['o_err']:.0e}"
    )
    if row["commit_right"]:
        line += f" commit {row['commit_us']:6.1f} x{row['commit_over_readwrite']:.2f} S {row['state_err']:.0e}"
        line += f" {row['commit_tile']}"
    else:
        line += " commit wrong"
    if row.get("snapshots_us"):
        line += f" snapshots {row['snapshots_us']:8.1f} x{row['snapshots_over_verify']:.1f}"
    return line


if __name__ == "__main__":
    main()
