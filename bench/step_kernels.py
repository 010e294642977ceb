"""Which kernels does a step of one period run under each commit policy, and for how long?

    python -m bench.step_kernels [--widths 1,1,1] [--batch 1] [--policies store_all reconstruct]

The step of bench/capacity_steps.py, replayed as a CUDA graph under the profiler: kernels by name, with the microseconds and
launches of one replay, and what lies between kernels. Policies are compiled by a process each and profiled one after another.
Results go to bench/results/step_kernels.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.capacity_steps import CompiledStep, one_period
from bench.graph_timing import capture, sorted_us
from bench.machine import machine_line
from treewy_inductor import DraftTree

RESULTS = Path(__file__).parent / "results"
REPLAYS = 20
# Seconds that a policy waits for the others' compiles.
PATIENCE = 150


def kernels_of(graph: torch.cuda.CUDAGraph) -> dict[str, Any]:
    """Return the median microseconds of a replay, and by kernel name those of its launches and how many there are."""
    for _ in range(3):
        graph.replay()
    times = sorted_us(graph.replay, REPLAYS)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name][0] += event.time_range.elapsed_us() / REPLAYS
            found[event.name][1] += 1 / REPLAYS
    return {"us": times[len(times) // 2], "kernels": {name: [round(x, 2) for x in pair] for name, pair in found.items()}}


@torch.no_grad()
def run_policy(policy: str, widths: str, batch: int, barrier: Any, turn: Any, results: Any) -> None:
    """Compile, wait for the others, then profile alone; puts policy and kernels into ``results``."""
    tree = DraftTree.from_widths([int(width) for width in widths.split(",")])
    torch.manual_seed(0)
    model = one_period("35b")
    tokens = torch.randint(0, model.config.vocab_size, (batch, len(tree)), device="cuda")
    step = CompiledStep(model, tokens, tree, policy)
    graph = capture([step.run], 1)
    barrier.wait(PATIENCE)
    with turn:
        results.put((policy, kernels_of(graph)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="1,1,1")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--policies", nargs="*", default=["store_all", "reconstruct"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    context = multiprocessing.get_context("spawn")
    barrier, turn, results = context.Barrier(len(options.policies)), context.Lock(), context.Queue()
    case = options.widths, options.batch, barrier, turn, results
    workers = [context.Process(target=run_policy, args=(policy, *case)) for policy in options.policies]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=300) for _ in workers)
    for worker in workers:
        worker.join()
    machine = machine_line("bf16, fp32 state")
    print(f"{machine} | ({options.widths}), {options.batch} rows, one period")
    print(f"{'us (launches) a replay':26} " + " ".join(f"{policy:>18}" for policy in options.policies))
    own = [found[policy] for policy in options.policies]
    print(f"{'whole replay':26} " + " ".join(f"{each['us']:18.1f}" for each in own))
    sums = [[sum(pair[which] for pair in each["kernels"].values()) for which in (0, 1)] for each in own]
    print(f"{'all kernels':26} " + " ".join(f"{us:10.1f} ({count:5.0f})" for us, count in sums))
    names = sorted({name for each in own for name in each["kernels"]}, key=lambda name: -_spread(own, name))
    for name in names[:60]:
        pairs = [each["kernels"].get(name, [0.0, 0.0]) for each in own]
        print(f"{name[:26]:26} " + " ".join(f"{us:10.1f} ({count:5.0f})" for us, count in pairs) + f"  {name[26:76]}")
    options.out.mkdir(parents=True, exist_ok=True)
    data = {"machine": machine, "widths": options.widths, "batch": options.batch, "policies": found}
    (options.out / "step_kernels.json").write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps({policy: round(each["us"], 1) for policy, each in found.items()}))


def _spread(own: list[dict[str, Any]], name: str) -> float:
    times = [each["kernels"].get(name, [0.0])[0] for each in own]
    return max(times) - min(times) + 1e-3 * max(times)


if __name__ == "__main__":
    main()
