"""What does the solve over a tree cost as the tree grows? ``python -m bench.time_over_nodes``

For chains and wide trees of 4 to 256 nodes: a verification, and the same nodes without ancestors, each a root, which leaves
nothing to solve. What lies between the two is the solve alone: inverse, and the sums over ancestors. It is measured twice: as
the kernel runs, where it may hide behind the read of the states, and where all heads share one state, which stays in cache, so
that nothing hides it. Beside it torch.linalg.solve_triangular, given G ready made, for as many systems and right sides.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from bench.graph_timing import time_calls, time_read
from bench.kernel_cases import Shape, arguments, copies, float64_results, tree_parents
from bench.kernels import RESULTS, free_memory, machine
from bench.planned_verify import PlannedVerify
from bench.tune_kernels import compile_tiles

NODES = (4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256)


def time_verify(parents: list[int], batch: int, shape: Shape) -> dict[str, Any]:
    """Return the errors of a verification and, if it is right, microseconds: its own, with one state for all, of one read."""
    cases = [arguments(parents, batch, shape, seed) for seed in range(copies(batch, shape))]
    shared = (*cases[0][:5], cases[0][5][:1, :1].expand_as(cases[0][5]), *cases[0][6:])
    planned, in_cache = [PlannedVerify(case) for case in cases], PlannedVerify(shared)
    judgements = [planned[0].judge(float64_results(cases[0])), in_cache.judge(float64_results(shared))]
    o_err, u_err = (max(each.errors[i] for each in judgements) for i in (0, 1))
    row: dict[str, Any] = {"o_err": o_err, "u_err": u_err, "right": all(each.is_right for each in judgements)}
    if row["right"]:
        for each in planned[1:]:
            each.run()
        row["us"] = time_calls([each.run for each in planned], replays=7).median
        row["in_cache_us"] = time_calls([in_cache.run], replays=7).median
        row["read_us"] = time_read([case[5].transpose(2, 3) for case in cases]).median
    return row


def time_library(nodes: int, batch: int, shape: Shape) -> float:
    """Return the microseconds of solving ``(I + G) U = R`` for every row and head by torch, G given."""
    systems = batch * shape.HV
    G = torch.eye(nodes, device="cuda") + 0.1 * torch.randn(systems, nodes, nodes, device="cuda").tril(-1)
    R = torch.randn(systems, nodes, shape.V, device="cuda")

    def solve() -> torch.Tensor:
        return torch.linalg.solve_triangular(G, R, upper=False, unitriangular=True)

    U = solve()
    assert float((G @ U - R).norm() / R.norm()) < 1e-4
    return time_calls([solve], replays=5).median


def measure(tree: str, nodes: int, batch: int, shape: Shape, roots: dict[str, Any]) -> dict[str, Any]:
    """Return one row, microseconds; ``roots`` is what :func:`time_verify` says of the nodes without ancestors."""
    found = time_verify(tree_parents(f"{tree}{nodes}"), batch, shape)
    row = {"tree": tree, "nodes": nodes, "batch": batch, "u_err": found["u_err"], "o_err": found["o_err"]}
    row["right"] = found["right"] and roots["right"]
    if row["right"]:
        row |= {"read_us": found["read_us"], "verify_us": found["us"], "roots_us": roots["us"]}
        row |= {"added_us": found["us"] - roots["us"], "solve_us": found["in_cache_us"] - roots["in_cache_us"]}
    return row


def tabulate(row: dict[str, Any]) -> str:
    named = f"{row['tree']:>6} {row['nodes']:>4} {row['batch']:>4}"
    if not row["right"]:
        return f"{named} wrong: u {row['u_err']:.1e} o {row['o_err']:.1e}"
    figures = (
        f"read {row['read_us']:7.1f} verify {row['verify_us']:8.1f} roots {row['roots_us']:8.1f} adds {row['added_us']:8.1f}"
    )
    return f"{named} {figures} solve {row['solve_us']:8.1f} library {row['library_us']:9.1f} us  u {row['u_err']:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="8,128")
    parser.add_argument("--nodes", default=",".join(map(str, NODES)))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    about, shape = machine(), Shape()
    print(" | ".join(about.values()) + " | bf16, float32 state, heads 16/32, dims 128/128")
    sizes = [int(nodes) for nodes in options.nodes.split(",")]
    batches = [int(batch) for batch in options.batches.split(",")]
    compile_tiles((nodes, batch, shape, None) for nodes in sizes for batch in batches)
    rows: list[dict[str, Any]] = []
    file = options.out / "time_over_nodes.json"
    for batch in batches:
        for nodes in sizes:
            library = time_library(nodes, batch, shape)
            roots = time_verify([-1] * nodes, batch, shape)
            free_memory()
            for tree in ("chain", "wide"):
                rows.append({**measure(tree, nodes, batch, shape, roots), "library_us": library})
                print(tabulate(rows[-1]), flush=True)
                free_memory()
            file.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
