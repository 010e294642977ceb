"""What does verifying and committing a 40-node tree cost, beside decoding one token?

``python -m bench.step`` takes Qwen3.5 shapes with random bf16 weights. Ours is the whole step in one CUDA graph: derive the
tree, verify, accept, commit. The baseline is stock ``torch.compile(mode="reduce-overhead")`` of a one-token forward with
transformers' static cache. Each case compiles in a process of its own: the first alone, so that its compile time is what a
user waits, then the others side by side. Then they are timed one after the other, so that nothing runs beside a timing. A
time is printed only if the tree's logits are right: some root-to-node paths are run as ordinary sequences by the same
weights in float32, and the step's error may be 1.1 times plain eager bf16's.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

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


def run_case(
    size: str, batch: int, lengths: list[int], is_first: bool, compiled: Any, barrier: Any, turn: Any, results: Any
) -> None:
    """Compile, wait for the others, then time alone; puts one row, or the error, into ``results``."""
    row: dict[str, Any] = {"model": size, "batch": batch, "nodes": len(DraftTree.from_widths(WIDTHS))}
    try:
        model, stock = (random_model(size, "cuda", attention) for attention in ("treewy", "sdpa"))
        prompt = torch.randint(0, model.config.vocab_size, (batch, PROMPT), device="cuda")
        if not is_first:
            compiled.wait()
        ours = Ours(model, prompt, lengths[0])
        if is_first:
            print(torch._dynamo.utils.compile_times(), file=sys.stderr, flush=True)
        compiled.set()
        decode = Decode(stock, prompt, lengths[0])
        long = Ours(model, prompt, lengths[1]) if len(lengths) > 1 else None
        row |= {"compile_s": ours.compile_s, "decode_compile_s": decode.compile_s}
        row["err"], row["eager_err"] = ours.errors(stock)
    except Exception as error:
        compiled.set()
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    barrier.wait()
    with turn:
        if "error" not in row and row["err"] <= 1.1 * row["eager_err"]:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            row["step_us"], row["step_p10"], row["step_p90"] = Timing.of(sorted_us(ours.run, REPEATS))
            row["decode_us"], row["decode_p10"], row["decode_p90"] = Timing.of(sorted_us(decode.run, REPEATS))
            row["ungraphed_us"] = Timing.of(sorted_us(ours.run_uncaptured, 10)).median
            row["step_over_decode"] = row["step_us"] / row["decode_us"]
            if long is not None:
                row["long_cache_over_short"] = Timing.of(sorted_us(long.run, REPEATS)).median / row["step_us"]
            row["recompiles"] = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
            row["recaptures"] = ours.step.captures - 1
        results.put(row)


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
    )


def main() -> None:
    """Run the cases and write bench/results/step.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="0.8B:1,0.8B:16,4B:1,4B:16", help="size:batch, separated by commas")
    parser.add_argument("--max-length", default="2048,32768", help="of the cache; a second one is timed beside the first")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    cases = [case.split(":") for case in options.cases.split(",")]
    lengths = [int(length) for length in options.max_length.split(",")]
    context = multiprocessing.get_context("spawn")
    compiled, barrier, turn, results = context.Event(), context.Barrier(len(cases)), context.Lock(), context.Queue()
    workers = []
    for index, (size, batch) in enumerate(cases):
        # The long cache costs a compile of its own, so one case answers for it.
        own = lengths if index == 0 else lengths[:1]
        shared = compiled, barrier, turn, results
        workers.append(context.Process(target=run_case, args=(size, int(batch), own, index == 0, *shared)))
        workers[-1].start()
    print(machine_line("bf16"), flush=True)
    print("model batch  decode us  step us (p10-p90)  no graph us compile s  ratio", flush=True)
    rows = []
    for _ in workers:
        rows.append(results.get())
        print(tabulate(rows[-1]), flush=True)
    for worker in workers:
        worker.join()
    timed = [row for row in rows if "step_us" in row]
    if timed:
        worst = max(row["step_over_decode"] for row in timed)
        print(f"A step over {timed[0]['nodes']} nodes costs at most {worst:.2f} times a decoded token.")
    report = {"machine": machine_line("bf16"), "date": time.strftime("%Y-%m-%d"), "rows": rows}
    report |= {"recompiles": sum(row["recompiles"] for row in timed), "recaptures": sum(row["recaptures"] for row in timed)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "step.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
