"""What does verifying and committing a 40-node tree cost, beside decoding one token?

``python -m bench.step`` takes Qwen3.5 shapes with random bf16 weights. Ours is the whole step in one CUDA graph: derive the
tree, verify, accept, commit. The baseline is stock ``torch.compile(mode="reduce-overhead")`` of a one-token forward with
transformers' static cache. Each side compiles in a process of its own with empty caches, ours first, a few at once. When
nothing compiles any more, the sides of a case are timed in turns of some steps as a host calls them, so that both see the same
machine; no garbage is collected then, no compiler is up, and a turn begins with steps that are not timed, since a host that was
idle is slow. Stock's recorded graphs cannot be replayed by themselves: Inductor reuses the memory that they read. A ratio, of
medians, is printed only if neither side drifted from turn to turn (:mod:`bench.turns`), and a time only if the tree's logits
are right: some root-to-node paths are run as ordinary sequences by the same weights in float32, and the step's error may be
1.1 times plain eager bf16's.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.graph_timing import Timing
from bench.machine import machine_line
from bench.step_process import Job, StepProcess
from bench.step_report import HEAD, is_right, keep, row_of, tabulate
from bench.turns import Side

RESULTS = Path(__file__).parent / "results"
TURNS, STEPS_A_TURN, ATTEMPTS = 6, 40, 2
UNCAPTURED = 8
STILL = 0.1
KINDS = ("step", "outlined", "long", "decode")


def prepare(processes: Sequence[StepProcess], at_once: int, note: Callable[[], object]) -> None:
    """Load and compile ``at_once`` at once in this order, and check each tree's logits when it is compiled.

    Args:
        note: keeps what is known so far; called after each.
    """
    checking, noting = threading.Lock(), threading.Lock()

    def prepare_one(process: StepProcess) -> None:
        process.ask("compile")
        process.found["compiled_beside"] = min(at_once, len(processes)) - 1
        took = process.error or f"compiled in {process.found['compile_s']:.1f} s"
        print(f"{time.strftime('%X')} {process.job}: {took}", flush=True)
        if process.job.kind != "decode":
            # A check holds the weights once more, in float32.
            with checking:
                process.ask("check")
        with noting:
            note()

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(prepare_one, processes))


def time_in_turns(sides: Sequence[StepProcess]) -> None:
    """Time the sides of one case, the baseline first; once more if one drifted, and keep the time the worst drifted less."""
    best: list[Side] = []
    for _ in range(ATTEMPTS):
        turns: list[list[list[float]]] = [[] for _ in sides]
        for _ in range(TURNS):
            for side, own in zip(sides, turns, strict=True):
                own.append(side.ask("time_runs", STEPS_A_TURN) or [])
        if not sides or not all(turn for own in turns for turn in own):
            break
        told = [Side.of(own) for own in turns]
        if not best or max(side.drift for side in told) < max(side.drift for side in best):
            best = told
        if all(side.drift <= STILL for side in best):
            break
    for process, side in zip(sides, best, strict=False):
        process.found |= side.quantiles | {"drift": side.drift, "turns": side.medians}


def time_case(sides: Sequence[StepProcess]) -> None:
    """Time all sides of a case, and ours without a graph; count what was compiled and captured meanwhile."""
    for side in sides:
        side.ask("quieten")
    before = [side.ask("counts") for side in sides]
    time_in_turns(sides)
    for side, counted in zip(sides, before, strict=True):
        now = side.ask("counts")
        if now and counted:
            side.found |= {name: now[name] - counted[name] for name in ("recompiles", "recaptures")}
        if side.job.kind != "decode" and (samples := side.ask("time_uncaptured", UNCAPTURED)):
            side.found["ungraphed_us"] = Timing.of(sorted(samples)).median


def write_kernels(cases: Sequence[Sequence[StepProcess]], out: Path) -> None:
    """Write which kernels the first two sides of each case run, longest first."""
    found: dict[str, Any] = {}
    for sides in cases:
        for side in sides[:2]:
            found[str(side.job)] = side.ask("kernels")
            (out / "step_kernels.json").write_text(json.dumps(found, indent=0) + "\n")


def jobs_of(options: argparse.Namespace) -> list[list[Job]]:
    """Return the jobs of each case: stock, ours, and ours in other ways."""
    length, *longer = (int(each) for each in options.max_length.split(","))
    cases: list[list[Job]] = []
    for case in options.cases.split(","):
        size, batch = case.split(":")
        folder = options.compile_times
        table = folder and folder / f"compile_times_{size}_{batch}.txt"
        jobs = [Job("decode", size, int(batch), length), Job("step", size, int(batch), length, table)]
        jobs += [Job("long", size, int(batch), each) for each in longer if not cases]
        jobs += [Job("outlined", size, int(batch), length)] if case in options.outlined.split(",") else []
        cases.append(jobs)
    return cases


def main() -> None:
    """Run the cases and write bench/results/step.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="0.8B:1,0.8B:16,4B:1,4B:16", help="size:batch, separated by commas")
    parser.add_argument("--max-length", default="2048,32768", help="of the cache; a second one is timed for the first case")
    parser.add_argument("--outlined", default="0.8B:1", help="cases timed with treewy.outline, too")
    parser.add_argument("--at-once", type=int, default=3, help="how many compile side by side")
    parser.add_argument("--kernels", action="store_true", help="write step_kernels.json as well")
    parser.add_argument("--compile-times", type=Path, help="folder for Dynamo's tables of where our compiles' time went")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    print(machine_line("bf16"), flush=True)
    jobs = jobs_of(options)
    # The largest of ours first, stock last: what is begun early runs beside others for longest.
    order = sorted((job for case in reversed(jobs) for job in case), key=lambda job: KINDS.index(job.kind))
    threads = max(2, 2 * len(os.sched_getaffinity(0)) // options.at_once)
    started = {job: StepProcess(job, threads) for job in order}
    cases = [[started[job] for job in case] for case in jobs]
    options.out.mkdir(parents=True, exist_ok=True)

    def note() -> dict[str, Any]:
        return keep([row_of(sides, STILL) for sides in cases], options.out)

    prepare(list(started.values()), options.at_once, note)
    print(HEAD, flush=True)
    for sides in cases:
        time_case([side for side in sides if not side.error and is_right(side.found)])
        print(tabulate(row_of(sides, STILL)), flush=True)
        found = note()
    if options.kernels:
        write_kernels(cases, options.out)
    for process in started.values():
        process.close()
    rows = found["rows"]
    ratios = [row["step_over_decode"] for row in rows if row.get("step_over_decode")]
    if ratios:
        print(f"A step over {rows[0]['nodes']} nodes costs at most {max(ratios):.2f} times a decoded token.")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
