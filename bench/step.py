"""What does verifying and committing a 40-node tree cost, beside decoding one token?

``python -m bench.step`` takes Qwen3.5 shapes with random bf16 weights. Ours is the whole step in one CUDA graph: derive the
tree, verify, accept, commit. The baseline is stock ``torch.compile(mode="reduce-overhead")`` of a one-token forward with
transformers' static cache. Each compiles in a process of its own with an empty cache: the first step alone, so that its
compile time is what a user waits, then all others side by side. Then they are timed one after the other, so that nothing
runs beside a timing; a row says so if one process took so long to compile that the others did not wait for it. A time is
printed only if the tree's logits are right: some root-to-node paths are run as ordinary sequences by the same weights in
float32, and the step's error may be 1.1 times plain eager bf16's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.graph_timing import Timing, sorted_us
from bench.machine import machine_line, measured_commit
from bench.whole_step import PROMPT, WIDTHS, Decode, Ours, random_model
from treewy_inductor.tree import DraftTree

RESULTS = Path(__file__).parent / "results"
REPEATS = 30


class Job(NamedTuple):
    """What one process compiles and times.

    Attributes:
        kind: "step" ours, "decode" stock, "long" ours on the longer cache, "outlined" ours with ``treewy.outline``.
        is_first: whether it compiles at once; the others wait for the first step's compile.
        compile_times: where the first step leaves Dynamo's table of where its compile time went.
        patience_s: how long it waits for the others once it is compiled itself.
    """

    kind: str
    size: str
    batch: int
    max_length: int
    is_first: bool
    compile_times: Path | None
    patience_s: float


class Gates(NamedTuple):
    """Shared by all processes: ``first`` is set once the first step is compiled, ``all_compiled`` waits for the others."""

    first: Any
    all_compiled: Any
    turn: Any
    results: Any


def run_job(job: Job, gates: Gates) -> None:
    """Compile, wait for the others, then time alone; puts the job and what was found, or the error, into the results."""
    found: dict[str, Any] = {}
    try:
        model = random_model(job.size, "cuda", "sdpa" if job.kind == "decode" else "treewy")
        prompt = torch.randint(0, model.config.vocab_size, (job.batch, PROMPT), device="cuda")
        if not job.is_first:
            gates.first.wait()
        timed: Ours | Decode
        if job.kind == "decode":
            timed = Decode(model, prompt, job.max_length)
        else:
            timed = Ours(model, prompt, job.max_length, outline=job.kind == "outlined")
            found["tree_compile_s"] = timed.tree_compile_s
        found["compile_s"] = timed.compile_s
        if job.compile_times is not None:
            job.compile_times.write_text(torch._dynamo.utils.compile_times())
        gates.first.set()
        print(f"{job.kind} of {job.size}, batch {job.batch}: compiled in {timed.compile_s:.1f} s", flush=True)
        if isinstance(timed, Ours):
            found["err"], found["eager_err"] = timed.errors(random_model(job.size, "cuda", "sdpa"))
            if job.is_first:
                found["random_trees"] = timed.replayed()
            timed.cache.restore(timed.start)
            torch.cuda.empty_cache()
    except Exception as error:
        gates.first.set()
        found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    try:
        gates.all_compiled.wait(job.patience_s)
    except threading.BrokenBarrierError:
        found["beside_a_compile"] = True
    with gates.turn:
        if "error" not in found and found.get("err", 0) <= 1.1 * found.get("eager_err", 1):
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            found["us"], found["p10"], found["p90"] = Timing.of(sorted_us(timed.run, REPEATS))
            if isinstance(timed, Ours):
                found["ungraphed_us"] = Timing.of(sorted_us(timed.run_uncaptured, 10)).median
                found["recaptures"] = timed.step.captures - 1
            found["recompiles"] = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
        gates.results.put((job, found))


def row_of(step: dict[str, Any], decode: dict[str, Any], size: str, batch: int) -> dict[str, Any]:
    """Return a row of the report from what both processes of a case found."""
    row: dict[str, Any] = {"model": size, "batch": batch, "nodes": len(DraftTree.from_widths(WIDTHS))}
    row |= {"commit": measured_commit(), "outlined": False}
    errors = [found["error"] for found in (step, decode) if "error" in found]
    if errors:
        return row | {"error": "; ".join(errors)}
    row |= {"compile_s": step["compile_s"], "tree_compile_s": step["tree_compile_s"]}
    row |= {"decode_compile_s": decode["compile_s"], "err": step["err"], "eager_err": step["eager_err"]}
    if "random_trees" in step:
        row["random_trees"] = step["random_trees"]
    if "beside_a_compile" in step or "beside_a_compile" in decode:
        row["beside_a_compile"] = True
    if "us" in step:
        for name, found in (("step", step), ("decode", decode)):
            row |= {f"{name}_{each}": found[each] for each in ("us", "p10", "p90")}
        row |= {each: step[each] for each in ("ungraphed_us", "recompiles", "recaptures")}
        row["step_over_decode"] = row["step_us"] / row["decode_us"]
    return row


def tabulate(row: dict[str, Any]) -> str:
    """Return one line of the report."""
    head = f"{row['model']:>5} {row['batch']:>5}"
    if "error" in row:
        return f"{head}  {row['error']}"
    if "step_us" not in row:
        return f"{head}  wrong: error {row['err']:.1e}, eager bf16 {row['eager_err']:.1e}"
    return (
        f"{head} {row['decode_us']:>10.0f} {row['step_us']:>8.0f} ({row['step_p10']:.0f}-{row['step_p90']:.0f})"
        f" {row['ungraphed_us']:>10.0f} {row['compile_s']:>9.1f} {row['step_over_decode']:>6.2f}"
    ) + ("  beside a compile" if "beside_a_compile" in row else "")


def start(jobs: list[Job], cache_dir: str) -> tuple[list[Any], Gates]:
    """Start a process a job; the first has the machine's cores for its compile, the others share them afterwards."""
    context = multiprocessing.get_context("spawn")
    gates = Gates(context.Event(), context.Barrier(len(jobs)), context.Lock(), context.Queue())
    workers = []
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_dir
    for job in jobs:
        workers.append(context.Process(target=run_job, args=(job, gates)))
        workers[-1].start()
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(2, 2 * len(os.sched_getaffinity(0)) // len(jobs)))
    return workers, gates


def report(jobs: list[Job], gates: Gates, out: Path) -> list[dict[str, Any]]:
    """Print and keep each row as soon as both its processes are done, and return all rows."""
    rows: list[dict[str, Any]] = []
    parts: dict[tuple[str, str, int], dict[str, Any]] = {}
    alone = [(job.size, job.batch) for job in jobs if job.is_first]
    for _ in jobs:
        job, found = gates.results.get()
        parts[job.kind, job.size, job.batch] = found
        step, decode = (parts.get((kind, job.size, job.batch)) for kind in ("step", "decode"))
        if job.kind in ("step", "decode") and step is not None and decode is not None:
            rows.append(row_of(step, decode, job.size, job.batch))
            rows[-1]["compiled_alone"] = alone == [(job.size, job.batch)]
            print(tabulate(rows[-1]), flush=True)
        if job.kind not in ("step", "decode"):
            print(f"{job.size:>5} {job.batch:>5} {job.kind}: {found}", flush=True)
        for row in rows:
            compare(row, parts)
        keep(rows, out)
    return rows


def compare(row: dict[str, Any], parts: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    """Add to a row what the same step costs on a longer cache, and with outlined layers, where that was timed."""
    if "step_us" not in row:
        return
    for kind, name in (("long", "long_cache"), ("outlined", "outlined")):
        found = parts.get((kind, row["model"], row["batch"]), {})
        if "us" in found:
            row |= {f"{name}_us": found["us"], f"{name}_compile_s": found["compile_s"], f"{name}_err": found["err"]}
            row[f"{name}_over_step"] = found["us"] / row["step_us"]


def keep(rows: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    """Write step.json of the rows so far and return what it holds."""
    found = {"machine": machine_line("bf16"), "date": time.strftime("%Y-%m-%d"), "rows": rows}
    found |= {name: sum(row.get(name, 0) for row in rows) for name in ("recompiles", "recaptures")}
    out.mkdir(parents=True, exist_ok=True)
    (out / "step.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    """Run the cases and write bench/results/step.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="0.8B:1,0.8B:16,4B:1,4B:16", help="size:batch, separated by commas")
    parser.add_argument("--max-length", default="2048,32768", help="of the cache; a second one is timed for the first case")
    parser.add_argument(
        "--together", action="store_true", help="do not wait for the first compile: sooner done, slower compiles"
    )
    parser.add_argument("--patience", type=float, default=170, help="seconds that a compiled process waits for the others")
    parser.add_argument("--compile-times", type=Path, help="file for Dynamo's table of the first compile")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    lengths = [int(length) for length in options.max_length.split(",")]
    jobs: list[Job] = []

    def add(kind: str, size: str, batch: int, length: int = lengths[0]) -> None:
        table = options.compile_times if not jobs else None
        jobs.append(Job(kind, size, batch, length, options.together or not jobs, table, options.patience))

    for size, batch in (case.split(":") for case in options.cases.split(",")):
        add("step", size, int(batch))
        add("decode", size, int(batch))
    for length in lengths[1:2]:
        add("long", jobs[0].size, jobs[0].batch, length)
    add("outlined", jobs[0].size, jobs[0].batch)
    print(machine_line("bf16"), flush=True)
    print("model batch  decode us  step us (p10-p90)  no graph us compile s  ratio", flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache_dir:
        workers, gates = start(jobs, cache_dir)
        rows = report(jobs, gates, options.out)
        for worker in workers:
            worker.join()
    timed = [row for row in rows if "step_us" in row]
    if timed:
        worst = max(row["step_over_decode"] for row in timed)
        print(f"A step over {timed[0]['nodes']} nodes costs at most {worst:.2f} times a decoded token.")
    print(json.dumps(keep(rows, options.out)))


if __name__ == "__main__":
    main()
