"""What does each commit policy cost in the recurrent layers, and how many tokens should a trunk hold?

    python -m bench.policies [--quick] [--models 35b 397b-rank]

One row a (shape, tree, batch, policy): microseconds a layer for verify and commit together, one CUDA graph a step, rows
accepting paths of different lengths at every step; and of the commit alone. A policy's time is printed only if its outputs and
states agree with the reference in float64 after a dozen steps. Kernels are compiled and checked by processes side by side,
then timed by one. Results go to bench/results/policies.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.graph_timing import capture
from bench.machine import machine_line
from bench.policy_steps import PolicyStep, policy_step, random_paths, scatter_trunks, set_path, worst_errors
from treewy_inductor.lowerings.register import register_lowerings
from treewy_inductor.memory import bytes_of, cache_buffers
from treewy_inductor.model_shapes import MODELS, ModelShape
from treewy_inductor.tree import DraftTree

RESULTS = Path(__file__).parent / "results"
SHAPES = {"35b": MODELS["qwen3.5-35b-a3b"], "397b-rank": MODELS["qwen3.5-397b-a17b"].shard(8)}
TREES = {"(1,1,1)": (1, 1, 1), "(3,3,3)": (3, 3, 3)}
# Accepted tokens a step, root included, of the paper's drafter on these trees.
ACCEPTED = {"(1,1,1)": 3.24, "(3,3,3)": 3.58}
BATCHES = (1, 8, 32, 128, 256)
# Sizes of the trunk are compared on one shape and tree; elsewhere one stands for them.
TRUNKS, TRUNK = (8, 16, 32), 16
# Relative errors that a bfloat16 output and a float32 state may have.
OUTPUT_BOUND, STATE_BOUND = 5e-3, 2e-5
STATE_BUDGET = 12 << 30
STEPS = 16
CHECKERS = 14


class Case(NamedTuple):
    """A policy at a tree of a shape; ``slots`` is what the trunk of replay holds."""

    model: ModelShape
    tree: str
    policy: str
    slots: int | None

    @property
    def label(self) -> str:
        return self.policy if self.slots is None else f"{self.policy} {self.slots}"

    @property
    def drafts(self) -> DraftTree:
        return DraftTree.from_widths(TREES[self.tree])


def cases_of(model: ModelShape, tree: str) -> list[Case]:
    """Return the policies to compare at ``tree``, each size of a trunk on its own."""
    slots = TRUNKS if (model, tree) == (SHAPES["35b"], "(1,1,1)") else (TRUNK,)
    policies = ("store_all", None), ("reconstruct", None), *(("replay", each) for each in slots)
    return [Case(model, tree, *policy) for policy in policies]


def check(case: Case) -> tuple[float, float]:
    """Return the errors of outputs and states, and leave the kernels compiled for every batch size."""
    register_lowerings()
    errors = worst_errors(case.policy, case.slots, case.model.linear, case.drafts)
    # Triton compiles a size of 1, sizes divisible by 16 and others each in its own way.
    for batch in (1, 8, 16):
        step = policy_step(case.policy, case.slots, case.model.linear, case.drafts, 1, batch)
        step.run()
        torch.cuda.synchronize()
    return errors


def check_all(cases: Sequence[Case]) -> dict[Case, tuple[float, float]]:
    """Return the errors of all cases, found by several processes at once."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(CHECKERS, mp_context=context) as pool:
        return dict(zip(cases, pool.map(check, cases), strict=True))


def layers_that_fit(case: Case, batch: int) -> int:
    """Return how many layers to run: all, or as many as the states' budget holds."""
    nodes = len(case.drafts)
    buffers = cache_buffers(case.model, batch=batch, nodes=nodes, max_length=nodes, policy=case.policy)
    per_layer = bytes_of(buffers) / case.model.linear_layers
    return max(1, min(case.model.linear_layers, int(STATE_BUDGET / per_layer)))


def time_steps(graph: torch.cuda.CUDAGraph, step: PolicyStep, paths: Tensor) -> list[float]:
    """Return the microseconds of a replay for each of ``paths``, in ascending order, after one round that is not timed."""
    scatter_trunks(step.states)
    samples = []
    for which in [*paths, *paths]:
        set_path(step, which)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        samples.append((start, end))
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) * 1e3 for start, end in samples[len(paths) :])


def measure(case: Case, batch: int) -> dict[str, Any]:
    """Return a row: the mean times of a whole step and of its commit alone, a layer."""
    layers = layers_that_fit(case, batch)
    step = policy_step(case.policy, case.slots, case.model.linear, case.drafts, layers, batch)
    paths = random_paths(case.drafts, batch, STEPS, ACCEPTED[case.tree]).cuda()
    set_path(step, paths[0])
    times = time_steps(capture([step.run], 1), step, paths)
    commits = time_steps(capture([step.commit], 1), step, paths)
    return {
        "model": case.model.name,
        "tree": case.tree,
        "batch": batch,
        "policy": case.policy,
        "flush_every": case.slots,
        "layers": layers,
        "us_a_layer": statistics.fmean(times) / layers,
        "p10": times[len(times) // 10] / layers,
        "p90": times[-1 - len(times) // 10] / layers,
        "commit_us_a_layer": statistics.fmean(commits) / layers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two batch sizes only")
    parser.add_argument("--models", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    models = [SHAPES[name] for name in options.models]
    machine = machine_line("bf16, fp32 state")
    print(machine, flush=True)
    cases = [case for model in models for tree in TREES for case in cases_of(model, tree)]
    errors = check_all(cases)
    for case, (output_error, state_error) in errors.items():
        print(f"{case.model.name} {case.tree} {case.label}: output {output_error:.1e} state {state_error:.1e}")
    wrong = {case for case, found in errors.items() if not (found[0] <= OUTPUT_BOUND and found[1] <= STATE_BOUND)}
    register_lowerings()
    rows: list[dict[str, Any]] = []

    def save() -> None:
        options.out.mkdir(parents=True, exist_ok=True)
        data = {"machine": machine, "rows": rows, "wrong": [[case.model.name, case.tree, case.label] for case in wrong]}
        (options.out / "policies.json").write_text(json.dumps(data, indent=1) + "\n")

    for model in models:
        print(f"{model.name}: us a layer for verify and commit (commit alone)")
        for tree in TREES:
            print("tree     batch " + " ".join(f"{case.label:>16}" for case in cases_of(model, tree)), flush=True)
            for batch in (8, 128) if options.quick else BATCHES:
                line = f"{tree:8} {batch:5}"
                for case in cases_of(model, tree):
                    if case in wrong:
                        line += f" {'wrong':>16}"
                        continue
                    rows.append(measure(case, batch))
                    line += f" {rows[-1]['us_a_layer']:8.1f} ({rows[-1]['commit_us_a_layer']:5.1f})"
                    gc.collect()
                    torch.cuda.empty_cache()
                print(line, flush=True)
                save()
    best = _best_trunk(rows)
    print(f"On the chain a trunk of {best} tokens is fastest." if best else "No trunk was measured.")
    print(json.dumps({"rows": len(rows), "wrong": len(wrong), "flush_every": best}))


def _best_trunk(rows: list[dict[str, Any]]) -> int | None:
    """Return the trunk whose times, in logarithms, are the smallest in the mean where all sizes were timed."""
    times: dict[int, list[float]] = {}
    for row in rows:
        if row["flush_every"] is not None and (row["model"], row["tree"]) == (SHAPES["35b"].name, "(1,1,1)"):
            times.setdefault(row["flush_every"], []).append(row["us_a_layer"])
    return min(times, key=lambda slots: statistics.geometric_mean(times[slots])) if times else None


if __name__ == "__main__":
    main()
