"""At a memory budget, how many sequences does each commit policy admit, and what do users then see?

    python -m bench.capacity [--reuse] [--model 397b-rank]

Measured on the GPU: the forward of one period of Qwen3.5-35B-A3B, or of one of eight ranks of 397B-A17B
(bench/capacity_steps.py), a process a case; the commit on a full cache of all layers, whose allocation is compared with what
memory.py says. A step of the whole model is then as many periods as it has, embedding and output matrix once, and the commit;
between measured batch sizes it is interpolated. Budgets, concurrency and two traces of arrivals are replayed on these times
(bench/serve_queue.py). ``--reuse`` replays on the times measured before.

A point is memory-bound if store_all admits fewer sequences than the concurrency, else it has headroom; they are never averaged.
Memory-bound points are replayed twice: once with all the sequences that fit, once with as many as are written no more slowly
than store_all's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.capacity_measure import ACCEPTED, BATCHES, MAX_LENGTH, POLICIES, SERVED_SHAPES, measure, nodes_of, step_times
from bench.capacity_report import BUDGETS, CONCURRENCY, print_step_times, print_tables, summary
from bench.serve_queue import Served, Workload, serve, workload
from treewy_inductor.layer_shapes import default_flush_every
from treewy_inductor.memory import Buffer, bytes_of, cache_buffers, state_bytes
from treewy_inductor.model_shapes import ModelShape

RESULTS = Path(__file__).parent / "results"
MEAN_PROMPT, MEAN_ANSWER, REQUESTS = 256, 512, 600
# Activations, CUDA context and graphs.
WORKSPACE = 4 << 30

Times = dict[str, tuple[list[int], list[float]]]
Row = dict[str, Any]


def sequence_buffers(model: ModelShape, policy: str, nodes: int) -> tuple[Buffer, ...]:
    """Return what a cache of many sequences holds for each."""
    slots = default_flush_every(nodes, max(CONCURRENCY) * model.linear.value_heads)
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


def requests_at(times: Times, concurrency: int, widths: str, bursty: bool) -> Workload:
    """Return requests that arrive at nine tenths of what ``concurrency`` rows could serve, the same for every policy."""
    batches, seconds = times["reconstruct"]
    residence = MEAN_ANSWER / ACCEPTED[widths] * np.interp(concurrency, batches, seconds)
    residence += prompt_seconds(times, widths)(MEAN_PROMPT) * concurrency
    return workload(
        REQUESTS, 0.9 * concurrency / residence, bursty=bursty, mean_prompt=MEAN_PROMPT, mean_answer=MEAN_ANSWER, longest=1900
    )


def prompt_seconds(times: Times, widths: str) -> Callable[[int], float]:
    """Return what a prompt costs: a forward of as many tokens, which every policy runs alike."""
    batches, seconds = times["reconstruct"]
    forward_tokens = [batch * nodes_of(widths) for batch in batches]
    return lambda tokens: float(np.interp(tokens, forward_tokens, seconds))


def serve_rows(times: Times, policy: str, rows: int, widths: str, work: Workload) -> Served:
    """Serve ``work`` with at most ``rows`` sequences at a time."""
    batches, seconds = times[policy]
    steps = np.interp(np.arange(rows + 1), batches, seconds)
    return serve(work, rows, lambda count: float(steps[count]), prompt_seconds(times, widths), accepted_chances(widths))


def serve_no_slower(
    times: Times, policy: str, least: int, most: int, widths: str, work: Workload, tpot_ms: float
) -> tuple[int, Served]:
    """Admit as many of ``least`` to ``most`` sequences as are written at no more than ``tpot_ms`` a token, by bisection."""
    best = least, serve_rows(times, policy, least, widths, work)
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        served = serve_rows(times, policy, middle, widths, work)
        if served.tpot_ms <= tpot_ms:
            low, best = middle, (middle, served)
        else:
            high = middle - 1
    return best


def seen(steps: tuple[list[int], list[float]], held: Sequence[Buffer], policy: str, admitted: int, served: Served) -> Row:
    """Return what a server of ``admitted`` sequences holds and what its users see."""
    return {
        "policy": policy,
        "admitted": admitted,
        "states_gib": admitted * state_bytes(held) / 2**30,
        "cache_gib": admitted * bytes_of(held) / 2**30,
        "step_ms": float(np.interp(admitted, *steps)) * 1e3,
        "throughput": served.tokens_per_s,
        "p99_ttft_ms": served.p99_ttft_ms,
        "median_ttft_ms": served.median_ttft_ms,
        "tpot_ms": served.tpot_ms,
    }


def points(model: ModelShape, measured: dict[str, Any], gpu_bytes: int) -> tuple[list[Row], list[Row]]:
    """Return one row a (tree, trace, budget, concurrency, policy); and such rows again of memory-bound points, no slower.

    A policy that admits more sequences than store_all also writes each of them more slowly. In the second list it admits only
    as many as are written no more slowly than store_all's.
    """
    rows: list[Row] = []
    paced: list[Row] = []
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
                    work = requests_at(times, concurrency, widths, trace == "bursty")
                    point = {"tree": widths, "trace": trace, "budget": budget, "concurrency": concurrency, "bound": bound}
                    for policy in POLICIES:
                        served = serve_rows(times, policy, fit[policy], widths, work)
                        rows.append(point | seen(times[policy], held[policy], policy, fit[policy], served))
                    if bound == "headroom":
                        continue
                    base = rows[-len(POLICIES)]
                    paced.append(base)
                    for policy in POLICIES[1:]:
                        limits = fit["store_all"], fit[policy], widths, work, base["tpot_ms"]
                        admitted, served = serve_no_slower(times, policy, *limits)
                        paced.append(point | seen(times[policy], held[policy], policy, admitted, served))
    return rows, paced


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
    parser.add_argument("--batches", nargs="*", type=int, help="measure these batch sizes only")
    parser.add_argument("--split", action="store_true", help="compile each policy in a process of its own")
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

        measure(options.model, options.trees, options.batches, options.split, save)
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
    rows, paced = points(model, trees, measured["gpu_bytes"])
    print_tables(rows)
    data = {
        "model": model.name,
        "machine": measured["machine"],
        "max_length": MAX_LENGTH,
        "rows": rows,
        "summary": summary(rows),
        "paced_rows": paced,
        "paced_summary": summary(paced),
        "memory_ratios": {widths: memory_ratios(model, nodes_of(widths)) for widths in trees},
        "bytes_equal_allocated": bytes_equal_allocated(measured),
    }
    (options.out / f"capacity{suffix}.json").write_text(json.dumps(data, indent=1) + "\n")
    last = ("summary", "paced_summary", "memory_ratios", "bytes_equal_allocated")
    print(json.dumps({"points": len(rows)} | {name: data[name] for name in last}))


if __name__ == "__main__":
    main()
