"""At a memory budget, how many sequences does each commit policy admit, and what do users then see?

    python -m bench.capacity [--reuse]

Measured on the GPU: the forward of one period of Qwen3.5-35B-A3B (bench/capacity_steps.py), a process a batch size; the
commit on a full cache of all 40 layers, whose allocation is compared with what memory.py says. A step of the whole model is
then ten periods, embedding and output matrix once, and the commit; between measured batch sizes it is interpolated. Budgets,
concurrency and two traces of arrivals are replayed on these times (bench/serve_queue.py). ``--reuse`` replays on the times
measured before.

A point is memory-bound if store_all admits fewer sequences than the concurrency, else it has headroom; they are never averaged.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.capacity_measure import ACCEPTED, BATCHES, MAX_LENGTH, MODEL, POLICIES, measure, step_times
from bench.serve_queue import Served, serve, workload
from treewy_inductor.memory import bytes_of, cache_buffers, nodes_of_widths

RESULTS = Path(__file__).parent / "results"
BUDGETS = (0.6, 0.75, 0.9)
CONCURRENCY = (1, 8, 32, 64, 128, 256)
MEAN_PROMPT, MEAN_ANSWER, REQUESTS = 256, 512, 600
# Activations, CUDA context and graphs.
WORKSPACE = 4 << 30


def admitted(policy: str, budget: float, gpu_bytes: int, weights: int, nodes: int, concurrency: int) -> int:
    """Return how many sequences fit beside the weights, at most ``concurrency``."""
    one = bytes_of(cache_buffers(MODEL, batch=1, nodes=nodes, max_length=MAX_LENGTH, policy=policy))
    return min(concurrency, int((budget * gpu_bytes - weights - WORKSPACE) // one))


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
    nodes = nodes_of_widths([int(width) for width in widths.split(",")])
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


def points(measured: dict[str, Any], gpu_bytes: int) -> list[dict[str, Any]]:
    """Return one row a (tree, trace, budget, concurrency, policy)."""
    rows = []
    for widths, found in measured.items():
        nodes = nodes_of_widths([int(width) for width in widths.split(",")])
        parameters = next(iter(found.values()))["parameters"]
        weights = 2 * (parameters["ends"] + parameters["period"] * 10)
        times = {policy: step_times(found, policy) for policy in POLICIES}
        for budget in BUDGETS:
            for concurrency in CONCURRENCY:
                fit = {policy: admitted(policy, budget, gpu_bytes, weights, nodes, concurrency) for policy in POLICIES}
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
                                "step_ms": float(np.interp(fit[policy], *times[policy])) * 1e3,
                                "throughput": served[policy].tokens_per_s,
                                "p99_ttft_ms": served[policy].p99_ttft_ms,
                                "median_ttft_ms": served[policy].median_ttft_ms,
                                "tpot_ms": served[policy].tpot_ms,
                            }
                        )
    return rows


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Print one table a tree and budget: a line a concurrency, Poisson arrivals, the policies side by side."""
    for widths in dict.fromkeys(row["tree"] for row in rows):
        for budget in BUDGETS:
            print(f"tree ({widths}), budget {budget}: admitted, tokens/s, p99 ms to the first token, ms a token")
            print("users bound    " + "  ".join(f"{policy:^28}" for policy in POLICIES))
            for concurrency in CONCURRENCY:
                at = {
                    row["policy"]: row
                    for row in rows
                    if (row["tree"], row["trace"], row["budget"], row["concurrency"])
                    == (widths, "poisson", budget, concurrency)
                }
                if at:
                    cells = (
                        f"{at[p]['admitted']:4} {at[p]['throughput']:7.0f} {at[p]['p99_ttft_ms']:8.0f} {at[p]['tpot_ms']:6.2f}"
                        for p in POLICIES
                    )
                    print(f"{concurrency:5} {at['store_all']['bound']:8} " + "  ".join(cells))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, for each tree, bound and policy, the geometric means of its figures over store_all's at the same points."""
    ratios: dict[tuple[str, str, str], list[tuple[float, float, float, float]]] = {}
    base = {(row["tree"], row["trace"], row["budget"], row["concurrency"]): row for row in rows if row["policy"] == "store_all"}
    for row in rows:
        other = base[row["tree"], row["trace"], row["budget"], row["concurrency"]]
        if row is not other:
            ratios.setdefault((row["tree"], row["bound"], row["policy"]), []).append(
                (
                    row["throughput"] / other["throughput"],
                    other["p99_ttft_ms"] / row["p99_ttft_ms"],
                    other["tpot_ms"] / row["tpot_ms"],
                    other["step_ms"] / row["step_ms"],
                )
            )
    names = ("throughput", "p99_ttft", "tpot", "step")
    return {
        f"{tree} {bound} {policy}": {"points": len(found)}
        | {
            name: round(float(np.exp(np.mean(np.log(values)))), 3)
            for name, values in zip(names, zip(*found, strict=True), strict=True)
        }
        for (tree, bound, policy), found in ratios.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reuse", action="store_true", help="replay on the times measured before; needs no GPU")
    parser.add_argument("--measure-only", action="store_true", help="measure step times and stop")
    parser.add_argument("--trees", nargs="*", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    times_file = options.out / "step_times.json"
    if options.reuse:
        measured = json.loads(times_file.read_text())
    else:
        import torch

        from bench.machine import machine_line

        measured = {
            "machine": machine_line("bf16, fp32 state"),
            "gpu_bytes": torch.cuda.get_device_properties(0).total_memory,
            "trees": {widths: measure(widths) for widths in options.trees},
        }
        times_file.write_text(json.dumps(measured, indent=1) + "\n")
    print(measured["machine"])
    for widths, found in measured["trees"].items():
        for batch, times in found.items():
            parts = "  ".join(
                f"{policy} {times[policy]['ms']:.3f} + commit {times['commit'][policy]['ms'] or float('nan'):.3f}"
                for policy in POLICIES
            )
            print(f"({widths}) batch {batch:>3}, ms of a period: {parts}; ends {times['ends']['ms']:.3f}")
    if options.measure_only:
        return
    rows = points({widths: found for widths, found in measured["trees"].items() if found}, measured["gpu_bytes"])
    commits = [
        commit
        for found in measured["trees"].values()
        for times in found.values()
        for commit in times["commit"].values()
        if commit["ms"] is not None
    ]
    is_equal = all(abs(commit["allocated"] - commit["counted"]) <= 0.001 * commit["counted"] for commit in commits)
    print_tables(rows)
    data = {"machine": measured["machine"], "rows": rows, "summary": summary(rows), "bytes_equal_allocated": is_equal}
    (options.out / "capacity.json").write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps({"points": len(rows), "summary": data["summary"], "bytes_equal_allocated": is_equal}))


if __name__ == "__main__":
    main()
