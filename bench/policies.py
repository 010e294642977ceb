"""What does each commit policy cost in the recurrent layers, and how many tokens should a trunk hold?

    python -m bench.policies [--quick]

One row a (shape, tree, batch): microseconds a layer for verify and commit together, one CUDA graph a step, rows accepting
paths of different lengths at every step. A policy's time is printed only if its outputs and states agree with the reference in
float64 after a dozen steps. Results go to bench/results/policies.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from bench.graph_timing import capture
from bench.machine import machine_line
from bench.policy_steps import policy_step, random_paths, set_path, worst_errors
from treewy_inductor.lowerings.register import register_lowerings
from treewy_inductor.memory import bytes_of, cache_buffers
from treewy_inductor.model_shapes import MODELS, ModelShape
from treewy_inductor.tree import DraftTree

RESULTS = Path(__file__).parent / "results"
SHAPES = (MODELS["qwen3.5-35b-a3b"], MODELS["qwen3.5-397b-a17b"].shard(8))
TREES = {"(1,1,1)": (1, 1, 1), "(3,3,3)": (3, 3, 3)}
# Accepted tokens a step, root included, of the paper's drafter on these trees.
ACCEPTED = {"(1,1,1)": 3.24, "(3,3,3)": 3.58}
BATCHES = (1, 8, 32, 64, 128, 256)
TRUNKS = (8, 16, 32)
POLICIES: tuple[tuple[str, int | None], ...] = (
    ("store_all", None),
    ("reconstruct", None),
    *(("replay", slots) for slots in TRUNKS),
)
# Relative errors that a bfloat16 output and a float32 state may have.
OUTPUT_BOUND, STATE_BOUND = 5e-3, 2e-5
STATE_BUDGET = 60 << 30


def layers_that_fit(model: ModelShape, batch: int, nodes: int, policy: str) -> int:
    """Return how many layers to run: all, or as many as the states' budget holds."""
    buffers = cache_buffers(model, batch=batch, nodes=nodes, max_length=nodes, policy=policy)
    per_layer = bytes_of(buffers) / model.linear_layers
    return max(1, min(model.linear_layers, int(STATE_BUDGET / per_layer)))


def measure(model: ModelShape, name: str, batch: int, policy: str, flush_every: int | None, steps: int) -> dict[str, Any]:
    """Return a row: the mean time of a step over ``steps`` steps, a layer, after the trunks have come into their rhythm."""
    tree = DraftTree.from_widths(TREES[name])
    layers = layers_that_fit(model, batch, len(tree.parents), policy)
    step = policy_step(policy, flush_every, model.linear, tree, layers, batch)
    paths = random_paths(tree, batch, steps, ACCEPTED[name]).cuda()
    set_path(step, paths[0])
    graph = capture([step.run], 1)
    for path in paths:
        set_path(step, path)
        graph.replay()
    samples = []
    for path in paths:
        set_path(step, path)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        samples.append((start, end))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) * 1e3 / layers for start, end in samples)
    return {
        "model": model.name,
        "tree": name,
        "batch": batch,
        "policy": policy,
        "flush_every": flush_every,
        "layers": layers,
        "us_a_layer": statistics.fmean(times),
        "p10": times[len(times) // 10],
        "p90": times[-1 - len(times) // 10],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest and one large batch only")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    register_lowerings()
    machine = machine_line("bf16, fp32 state")
    print(machine)
    batches = (8, 128) if options.quick else BATCHES
    wrong: dict[tuple[str, str, str, int | None], tuple[float, float]] = {}
    for model in SHAPES:
        for name, widths in TREES.items():
            for policy, slots in POLICIES:
                errors = worst_errors(policy, slots, model.linear, DraftTree.from_widths(widths))
                print(f"{model.name} {name} {policy} {slots or ''}: output {errors[0]:.1e} state {errors[1]:.1e}")
                if errors[0] > OUTPUT_BOUND or errors[1] > STATE_BOUND:
                    wrong[model.name, name, policy, slots] = errors
    rows: list[dict[str, Any]] = []
    labels = [policy if slots is None else f"{policy} {slots}" for policy, slots in POLICIES]
    for model in SHAPES:
        print(f"{model.name}: us a layer for verify and commit")
        print("tree     batch " + " ".join(f"{label:>11}" for label in labels) + "  store_all / reconstruct")
        for name in TREES:
            for batch in batches:
                line, times = f"{name:8} {batch:5}", []
                for policy, slots in POLICIES:
                    if (model.name, name, policy, slots) in wrong:
                        line += f" {'wrong':>11}"
                        continue
                    rows.append(measure(model, name, batch, policy, slots, steps=24))
                    times.append(rows[-1]["us_a_layer"])
                    line += f" {times[-1]:11.1f}"
                    gc.collect()
                    torch.cuda.empty_cache()
                print(line + (f" {times[0] / times[1]:8.2f}" if len(times) == len(POLICIES) else ""), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    data = {"machine": machine, "rows": rows, "wrong": [list(key) for key in wrong]}
    (options.out / "policies.json").write_text(json.dumps(data, indent=1) + "\n")
    best = _best_trunk(rows)
    print(f"Over all rows a trunk of {best} tokens is fastest." if best else "No trunk was measured.")
    print(json.dumps({"rows": len(rows), "wrong": len(wrong), "flush_every": best}))


def _best_trunk(rows: list[dict[str, Any]]) -> int | None:
    """Return the trunk whose times, in logarithms, are the smallest in the mean."""
    times: dict[int, list[float]] = {}
    for row in rows:
        if row["flush_every"] is not None:
            times.setdefault(row["flush_every"], []).append(row["us_a_layer"])
    return min(times, key=lambda slots: statistics.geometric_mean(times[slots])) if times else None


if __name__ == "__main__":
    main()
