"""How fast is a tree verified, beside one read of the states, and beside other projects' kernels?

``python -m bench.kernels`` prints a row a (tree, batch): the measured read floor, our verify, our commit and both fused in one
kernel beside a copy of the states, full states a node by the fastest kernel found (bench/peers.py), and the errors against
float64, without which no time is printed. ``--tune`` checks and times tiles instead (bench/tune_kernels.py).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from pathlib import Path
from typing import Any

import torch
import triton

from bench.graph_timing import time_calls, time_copy, time_read
from bench.kernel_cases import Shape, arguments, copies, float64_results, tree_parents
from bench.machine import machine_name, measured_commit
from bench.peers import best_snapshots, measure_peers
from bench.planned_commit import measure_commit
from bench.planned_fused import measure_fused
from bench.planned_verify import PlannedVerify
from bench.tune_kernels import tune_all
from treewy_inductor.lowerings import on_gpu

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, str]:
    """Return what the figures depend on."""
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {"machine": machine_name(), **versions, "commit": measured_commit()}


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def measure_ours(parents: list[int], batch: int, shape: Shape) -> dict[str, Any]:
    """Return times of verify, of commit, of the read floor and of a copy, and the errors."""
    cases = [arguments(parents, batch, shape, seed) for seed in range(copies(batch, shape))]
    verified = [PlannedVerify(case) for case in cases]
    judgement = verified[0].judge(float64_results(cases[0]))
    row: dict[str, Any] = dict(zip(("o_err", "u_err", "g_err", "scale_err"), judgement.errors, strict=True))
    row |= {"same_bits": judgement.same_bits, "right": judgement.is_right}
    if not judgement.is_right:
        return row
    for each in verified[1:]:
        each.run()
    stored = [case[5].transpose(2, 3) for case in cases]
    row |= {"read_us": time_read(stored).median, "copy_us": time_copy(stored).median}
    verify = time_calls([each.run for each in verified])
    row |= {"verify_us": verify.median, "verify_p10": verify.p10, "verify_p90": verify.p90}
    row["verify_over_read"] = row["verify_us"] / row["read_us"]
    row |= measure_commit(parents, cases, verified)
    if row["commit_right"]:
        row["commit_over_readwrite"] = row["commit_us"] / row["copy_us"]
    row |= measure_fused(parents, cases)
    if row["fused_right"]:
        row["fused_over_readwrite"] = row["fused_us"] / row["copy_us"]
    return row


def measure(tree: str, batch: int, shape: Shape) -> dict[str, Any]:
    """Return one row: ours, then the peers if ours are right."""
    parents = tree_parents(tree)
    row: dict[str, Any] = {"tree": tree, "nodes": len(parents), "batch": batch, **measure_ours(parents, batch, shape)}
    free_memory()
    if row["right"]:
        row["peers"] = measure_peers(parents, batch, shape)
        for peer in row["peers"].values():
            if peer["right"]:
                peer["over_verify"] = peer["us"] / row["verify_us"]
        row["snapshots_by"] = best_snapshots(row["peers"])
        if row["snapshots_by"] is not None:
            best = row["peers"][row["snapshots_by"]]
            row |= {"snapshots_us": best["us"], "snapshots_over_verify": best["over_verify"]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", default="chain4,w222,w333")
    parser.add_argument("--batches", default="8,128")
    parser.add_argument("--tune", action="store_true", help="check every tile of the table at its shapes, and time others")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    on_gpu.register_once()
    about = machine()
    print(" | ".join(about.values()) + " | bf16, float32 state, heads 16/32, dims 128/128")
    options.out.mkdir(parents=True, exist_ok=True)
    trees, batches = options.trees.split(","), [int(batch) for batch in options.batches.split(",")]
    rows: list[dict[str, Any]] = []
    # Kept as they come: whatever ends a run early leaves what it measured.
    if options.tune:
        for row in tune_all(trees, batches):
            rows.append(row)
            (options.out / "kernels_tune.json").write_text(a_line_a_row(about, rows))
    else:
        for tree, batch in itertools.product(trees, batches):
            rows.append(measure(tree, batch, Shape()))
            print(tabulate(rows[-1]), flush=True)
            (options.out / "kernels.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
            free_memory()
    print(json.dumps({**about, "rows": rows}))


def a_line_a_row(about: dict[str, str], rows: list[dict[str, Any]]) -> str:
    """Return JSON of many rows that a reader can still compare line by line."""
    lines = ",\n".join(map(json.dumps, rows))
    return f'{json.dumps(about)[:-1]}, "rows": [\n{lines}\n]}}\n'


def tabulate(row: dict[str, Any]) -> str:
    """Return the lines of a row, times in microseconds: ours, then one a peer."""
    named = f"{row['tree']:>8} {row['batch']:>4}"
    if not row["right"]:
        moving = "" if row["same_bits"] else ", bits move"
        return f"{named} wrong{moving}: u {row['u_err']:.1e} o {row['o_err']:.1e}"
    line = (
        f"{named} read {row['read_us']:7.1f} verify {row['verify_us']:7.1f} "
        f"({row['verify_p10']:.1f}-{row['verify_p90']:.1f}) x{row['verify_over_read']:.2f}"
        f" u {row['u_err']:.0e} o {row['o_err']:.0e}"
    )
    if row["commit_right"]:
        line += f" commit {row['commit_us']:6.1f} x{row['commit_over_readwrite']:.2f} S {row['state_err']:.0e}"
    else:
        line += f" commit wrong: S {row['state_err']:.1e}"
    if row["fused_right"]:
        line += f" fused {row['fused_us']:6.1f} x{row['fused_over_readwrite']:.2f}"
        line += f" u {row['fused_u_err']:.0e} S {row['fused_state_err']:.0e}"
    else:
        line += f" fused wrong: u {row['fused_u_err']:.1e} o {row['fused_o_err']:.1e} S {row['fused_state_err']:.1e}"
    for name, peer in row["peers"].items():
        line += f"\n{named}    {name:>9}, {peer['kind']:>9}: o {peer['o_err']:.0e} S {peer['state_err']:.0e} "
        line += f"{peer['us']:8.1f} x{peer['over_verify']:.2f}" if peer["right"] else "wrong"
        line += "  best of its kind" if name == row["snapshots_by"] else ""
    return line


if __name__ == "__main__":
    main()
