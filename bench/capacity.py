"""At a memory budget, how many sequences does each commit policy admit, and what do users then see?

    python -m bench.capacity [--reuse] [--model 397b-rank]

Measured on the GPU: the forward of one period of Qwen3.5-35B-A3B, or of one of eight ranks of 397B-A17B
(bench/capacity_steps.py), a process a case; the commit on a full cache of all layers, whose allocation is compared with what
memory.py says. A step of the whole model is then as many periods as it has, embedding and output matrix once, and the commit;
between measured batch sizes it is interpolated. Budgets, concurrency and two traces of arrivals are replayed on these times
(bench/serve_queue.py). ``--reuse`` replays on the times measured before.

A point is memory-bound if store_all admits fewer sequences than the concurrency, else it has headroom; they are never averaged.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.capacity_measure import ACCEPTED, BATCHES, MAX_LENGTH, POLICIES, SERVED_SHAPES, measure, nodes_of, step_times
from bench.capacity_report import BUDGETS, CONCURRENCY, print_step_times, print_tables, summary
from bench.serve_queue import Served, serve, workload
from treewy_inductor.layer_shapes import default_flush_every
from treewy_inductor.memory import Buffer, bytes_of, cache_buffers, state_bytes
from treewy_inductor.model_shapes import ModelShape

RESULTS = Path(__file__).parent / "results"
MEAN_PROMPT, MEAN_ANSWER, REQUESTS = 256, 512, 600
# Activations, CUDA context and graphs.
WORKSPACE = 4 << 30


def sequence_buffers(model: ModelShape, policy: str, nodes: int) -> tuple[Buffer, ...]:
    """Return what a cache of many sequences holds for each."""
    slots = default_flush_every(nodes, max(CONCURRENCY))
    return cache_buffers(model, batch=1, nodes=nodes, max_length=MAX_LENGTH, policy=policy, flush_every=slots)


def memory_ratios(model: ModelShape, nodes: int) -> dict[str, dict[str, float]]:
    """Return how many times the memory of each policy store_all holds for as many sequences.

    Full states alone; states with whatever stands in for draft nodes' states; the whole cache of ``MAX_LENGTH`` tokens.
    """
    found: dict[str, dict[str, float]] = {}
    for policy in POLICIES[1:]:
        pairs = [sequence_buffers(model, each, nodes) for each in ("store_all", policy)]
        alone = [
            sum(bytes_of(buffers, part=part) for part in ("recurrent state", "states of draft nodes")) for buffers in pairs
        ]
        held, whole = [state_bytes(buffers) for buffers in pairs], [bytes_of(buffers) for buffers in pairs]
        found[policy] = {
            name: round(each[0] / each[1], 2)
            for name, each in (("states", alone), ("states_and_stand_ins", held), ("whole_cache", whole))
        }
    return found


def accepted_chances(widths: str) -> list[float]:
    """Return the probabilities of writing 1, 2, ... tokens in a step whose mean is the drafter's."""
    levels = len(widths.split(",")) + 1
    low, high = 0.0, 1.0
    for _ in range(60):
        chance = (low + high) / 2
        mean = sum(chance**level for level in range(levels))
        low, high = (chance, high) if mean < ACCEPTED[widths] else (low, chance)
    return [chance**level * ((1 - chance) if level < levels - 1 else 1.0) for level in range(levels)]


def replay_point(
    times: dict[str, tuple[list[int], list[float]]], rows: dict[str, int], concurrency: int, widths: str, bursty: bool
) -> dict[str, Served]:
    """Serve the same requests under every policy; they arrive at nine tenths of what ``concurrency`` rows could serve."""
    nodes = nodes_of(widths)
    batches, seconds = times["reconstruct"]
    forward_tokens = [batch * nodes for batch in batches]
    residence = MEAN_ANSWER / ACCEPTED[widths] * np.interp(concurrency, batches, seconds)
    residence += float(np.interp(MEAN_PROMPT, forward_tokens, seconds)) * concurrency
    work = workload(
        REQUESTS, 0.9 * concurrency / residence, bursty=bursty, mean_prompt=MEAN_PROMPT, mean_answer=MEAN_ANSWER, longest=1900
    )
    served = {}
    for policy in POLICIES:
        own_batches, own_seconds = times[policy]
        served[policy] = serve(
            work,
            rows[policy],
            lambda count, b=own_batches, s=own_seconds: float(np.interp(count, b, s)),
            # A prompt costs a forward of as many tokens, which every policy runs alike.
            lambda tokens: float(np.interp(tokens, forward_tokens, seconds)),
            accepted_chances(widths),
        )
    return served


def points(model: ModelShape, measured: dict[str, Any], gpu_bytes: int) -> list[dict[str, Any]]:
    """Return one row a (tree, trace, budget, concurrency, policy)."""
    rows = []
    for widths, found in measured.items():
        first = next(iter(found.values()))
        periods = (model.linear_layers + model.softmax_layers) / first["layers"]
        weights = 2 * (first["parameters"]["ends"] + first["parameters"]["period"] * periods)
        times = {policy: step_times(model, found, policy) for policy in POLICIES}
        held = {policy: sequence_buffers(model, policy, nodes_of(widths)) for policy in POLICIES}
        for budget in BUDGETS:
            room = budget * gpu_bytes - weights - WORKSPACE
            for concurrency in CONCURRENCY:
                fit = {policy: min(concurrency, int(room // bytes_of(held[policy]))) for policy in POLICIES}
                if min(fit.values()) < 1 or concurrency > times["reconstruct"][0][-1]:
                    continue
                bound = "memory" if fit["store_all"] < concurrency else "headroom"
                for trace in ("poisson", "bursty"):
                    served = replay_point(times, fit, concurrency, widths, trace == "bursty")
                    for policy in POLICIES:
                        rows.append(
                            {
                                "tree": widths,
                                "trace": trace,
                                "policy": policy,
                                "budget": budget,
                                "concurrency": concurrency,
                                "bound": bound,
                                "admitted": fit[policy],
                                "states_gib": fit[policy] * state_bytes(held[policy]) / 2**30,
                                "cache_gib": fit[policy] * bytes_of(held[policy]) / 2**30,
                                "step_ms": float(np.interp(fit[policy], *times[policy])) * 1e3,
                                "throughput": served[policy].tokens_per_s,
                                "p99_ttft_ms": served[policy].p99_ttft_ms,
                                "median_ttft_ms": served[policy].median_ttft_ms,
                                "tpot_ms": served[policy].tpot_ms,
                            }
                        )
    return rows


def bytes_equal_allocated(measured: dict[str, Any]) -> bool:
    """Whether every cache that was made held the bytes counted for it: the whole up to the allocator's rounding."""
    commits = [
        commit for found in measured["trees"].values() for times in found.values() for commit in times["commit"].values()
    ]
    return all(
        abs(commit["allocated"] - commit["counted"]) <= 0.001 * commit["counted"]
        and commit["allocated_states"] == commit["counted_states"]
        for commit in commits
        if commit["ms"] is not None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SERVED_SHAPES), default="35b")
    parser.add_argument("--reuse", action="store_true", help="replay on the times measured before; needs no GPU")
    parser.add_argument("--measure-only", action="store_true", help="measure step times and stop")
    parser.add_argument("--trees", nargs="*", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    suffix = "" if options.model == "35b" else f"_{options.model}"
    times_file = options.out / f"step_times{suffix}.json"
    if options.reuse:
        measured = json.loads(times_file.read_text())
    else:
        import torch

        from bench.machine import machine_line

        measured = {
            "machine": machine_line("bf16, fp32 state"),
            "gpu_bytes": torch.cuda.get_device_properties(0).total_memory,
            "trees": {},
        }

        def save(found: dict[str, Any]) -> None:
            measured["trees"] = found
            times_file.write_text(json.dumps(measured, indent=1) + "\n")

        measure(options.model, options.trees, save)
    model = SERVED_SHAPES[options.model]
    print(f"{model.name} | {measured['machine']}")
    # A run that was cut short leaves cases whose commit was not timed.
    whole = {
        widths: {batch: row for batch, row in found.items() if "commit" in row} for widths, found in measured["trees"].items()
    }
    trees = measured["trees"] = {widths: found for widths, found in whole.items() if found}
    print_step_times(measured)
    if options.measure_only:
        return
    rows = points(model, trees, measured["gpu_bytes"])
    print_tables(rows)
    data = {
        "model": model.name,
        "machine": measured["machine"],
        "max_length": MAX_LENGTH,
        "rows": rows,
        "summary": summary(rows),
        "memory_ratios": {widths: memory_ratios(model, nodes_of(widths)) for widths in trees},
        "bytes_equal_allocated": bytes_equal_allocated(measured),
    }
    (options.out / f"capacity{suffix}.json").write_text(json.dumps(data, indent=1) + "\n")
    last = ("summary", "memory_ratios", "bytes_equal_allocated")
    print(json.dumps({"points": len(rows)} | {name: data[name] for name in last}))


if __name__ == "__main__":
    main()
