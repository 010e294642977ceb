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
import copy
import json
import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig, StaticCache

from bench.graph_timing import Timing, sorted_us
from bench.machine import machine_line
from treewy_inductor.backend import treewy
from treewy_inductor.captured_step import CapturedStep
from treewy_inductor.models.transformers_api import CACHE_KEYWORD
from treewy_inductor.models.tree_cache import TreeCache
from treewy_inductor.tree import DraftTree

RESULTS = Path(__file__).parent / "results"
WIDTHS = (3, 3, 3)
PROMPT = 1024
REPEATS = 30
# How long a compiled process waits for the others, in seconds.
PATIENCE_S = 170
CHECKED_NODES = (0, 1, 13, 39)
# The published config.json of each size.
SIZES: dict[str, dict[str, int]] = {
    "0.8B": {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 3584, "num_attention_heads": 8}
    | {"num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 16},
    "4B": {"hidden_size": 2560, "num_hidden_layers": 32, "intermediate_size": 9216, "num_attention_heads": 16}
    | {"num_key_value_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
}
COMMON = {"vocab_size": 248320, "head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
COMMON |= {"linear_conv_kernel_dim": 4, "tie_word_embeddings": True, "max_position_embeddings": 65536}


def random_model(size: str, device: str, attention: str = "treewy") -> Qwen3_5ForCausalLM:
    """Return a bf16 model of that size's shapes, in evaluation mode, with seeded random weights."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**COMMON | SIZES[size], dtype="bfloat16", attn_implementation=attention)
    with torch.device(device):
        model = Qwen3_5ForCausalLM(config).eval()
    return model.to(torch.bfloat16)


class Ours:
    """The captured step on a cache that holds the prompt, and its errors."""

    def __init__(self, model: Qwen3_5ForCausalLM, prompt: torch.Tensor, max_length: int) -> None:
        self.model, self.prompt = model, prompt
        self.tree = DraftTree.from_widths(WIDTHS)
        self.cache = TreeCache(model.config, prompt.shape[0], max_length, len(self.tree), device=prompt.device)
        self.cache.prefill(model, prompt)
        self.start = self.cache.snapshot()
        torch._dynamo.utils.counters.clear()
        started = time.perf_counter()
        self.compiled = torch.compile(model, backend=treewy, fullgraph=True, dynamic=False)
        self.step = CapturedStep(self.compiled, self.cache)
        self.compile_s = time.perf_counter() - started
        self.tokens = torch.randint(0, model.config.vocab_size, (prompt.shape[0], len(self.tree)), device=prompt.device)

    def errors(self, stock: Qwen3_5ForCausalLM) -> tuple[float, float]:
        """Return the worst error of the step's and of plain eager bf16's logits against float32, over some paths of row 0."""
        self.cache.restore(self.start)
        self.step(self.tree, self.tokens)
        logits = self.step.logits[0].float().clone()
        self.cache.restore(self.start)
        wide = copy.deepcopy(stock).float()
        ours, eager = [], []
        for node in CHECKED_NODES:
            path = self.tree.path_to(node)
            exact, plain = (self._along(model, path) for model in (wide, stock))
            ours.append(float((logits[node] - exact).norm() / exact.norm()))
            eager.append(float((plain - exact).norm() / exact.norm()))
        return max(ours), max(eager)

    def _along(self, model: Qwen3_5ForCausalLM, path: list[int]) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=self.prompt[:1], use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: cache})
            return model(input_ids=self.tokens[:1, path], use_cache=True, **{CACHE_KEYWORD: cache}).logits[0, -1].float()

    def run(self) -> None:
        """One step; every repeat starts at nearly the same length, since random drafts are rejected."""
        self.step(self.tree, self.tokens)

    def run_uncaptured(self) -> None:
        """The same work launched kernel by kernel."""
        self.step.run_uncaptured()


class Decode:
    """Stock compiled decoding of one token."""

    def __init__(self, model: Qwen3_5ForCausalLM, prompt: torch.Tensor, max_length: int) -> None:
        self.cache = StaticCache(config=model.config, max_cache_len=max_length)
        with torch.no_grad():
            model(input_ids=prompt, use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: self.cache})
        self.token = torch.ones(prompt.shape[0], 1, dtype=torch.int64, device=prompt.device)
        self.position = torch.full_like(self.token, prompt.shape[1])
        started = time.perf_counter()
        self.step = torch.compile(model, mode="reduce-overhead", dynamic=False)
        for _ in range(3):
            self.run()
        torch.cuda.synchronize()
        self.compile_s = time.perf_counter() - started

    def run(self) -> None:
        """One token at the same position each time: the cache's own counter would walk out of its buffer."""
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            inputs = {"input_ids": self.token, "position_ids": self.position, "use_cache": True}
            self.step(**inputs, **{CACHE_KEYWORD: self.cache}).logits.argmax(-1)


class Job(NamedTuple):
    """What one process compiles and times.

    Attributes:
        kind: "step" ours, "decode" stock, "long" ours on the longer cache.
        is_first: whether it compiles at once; the others wait for the first step's compile.
        compile_times: where the first step leaves Dynamo's table of where its compile time went.
    """

    kind: str
    size: str
    batch: int
    max_length: int
    is_first: bool
    compile_times: Path | None


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
        timed: Ours | Decode = (Decode if job.kind == "decode" else Ours)(model, prompt, job.max_length)
        found["compile_s"] = timed.compile_s
        if job.compile_times is not None:
            job.compile_times.write_text(torch._dynamo.utils.compile_times())
        gates.first.set()
        if isinstance(timed, Ours):
            found["err"], found["eager_err"] = timed.errors(random_model(job.size, "cuda", "sdpa"))
            torch.cuda.empty_cache()
    except Exception as error:
        gates.first.set()
        found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    try:
        gates.all_compiled.wait(PATIENCE_S)
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
    errors = [found["error"] for found in (step, decode) if "error" in found]
    if errors:
        return row | {"error": "; ".join(errors)}
    row |= {"compile_s": step["compile_s"], "decode_compile_s": decode["compile_s"]}
    row |= {"err": step["err"], "eager_err": step["eager_err"]}
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
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
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
        if job.kind != "long" and step is not None and decode is not None:
            rows.append(row_of(step, decode, job.size, job.batch))
            rows[-1]["compiled_alone"] = alone == [(job.size, job.batch)]
            print(tabulate(rows[-1]), flush=True)
            keep(rows, out)
    for (kind, size, batch), found in parts.items():
        if kind == "long":
            row = next(row for row in rows if (row["model"], row["batch"]) == (size, batch))
            if "us" in found and "step_us" in row:
                row |= {"long_cache_us": found["us"], "long_cache_over_short": found["us"] / row["step_us"]}
                print(f"The longer cache costs {row['long_cache_over_short']:.2f} times the shorter ({size}, batch {batch}).")
            else:
                print(f"longer cache: {found.get('error', found)}")
    keep(rows, out)
    return rows


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
    parser.add_argument("--compile-times", type=Path, help="file for Dynamo's table of the first compile")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    lengths = [int(length) for length in options.max_length.split(",")]
    jobs: list[Job] = []
    for size, batch in (case.split(":") for case in options.cases.split(",")):
        for kind in ("step", "decode"):
            table = options.compile_times if not jobs else None
            jobs.append(Job(kind, size, int(batch), lengths[0], options.together or not jobs, table))
    if len(lengths) > 1:
        jobs.append(Job("long", jobs[0].size, jobs[0].batch, lengths[1], False, None))
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
