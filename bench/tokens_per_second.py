"""How many tokens a second does a text get, decoded plainly, by chains and by trees?

    python -m bench.tokens_per_second [--cases small,0.8B] [--out bench/results]

Greedy, one row, on a CUDA device. Plain: stock ``torch.compile(mode="reduce-overhead")`` of a one-token forward with
transformers' static cache and sdpa; the host launches and reads nothing until the end. Ours: ``treewy.generate``, each step
one CUDA graph that drafts, verifies, accepts and commits, with its result read by the host every step.

small: the shipped model, fp32, drafts by its own prediction layer; a speed is printed only if the text is, token for token,
that of the model's own eager greedy decoding. 0.8B: the shape of Qwen3.5-0.8B with random bf16 weights, of which no drafter
guesses anything. So an oracle puts the right token among the siblings of a level as often as gives the accept length that
the shipped model was measured to have (results/accept_length.json); a prediction layer of random weights drafts too, for its
time alone. A speed is printed only if no token of the text scores less than the best, in float32 on the same text, by more
than eight times plain bf16's root mean square error.

Every shape compiles in a process of its own, all at once; then they are timed one after the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import StaticCache

import treewy_inductor as treewy
from bench.graph_timing import Timing
from bench.machine import machine_line
from bench.oracle_drafter import OracleDrafter, chance_of
from bench.whole_step import random_model
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.models.load_model import prompt_tokens
from treewy_inductor.models.small_model import load_small_model
from treewy_inductor.models.transformers_api import CACHE_KEYWORD

RESULTS = Path(__file__).parent / "results"
SHAPES: tuple[tuple[int, ...], ...] = ((), (1, 1, 1), (2, 2, 2), (3, 3, 3))
PROMPT = 'def read_lines(path, encoding="utf-8"):\n    """Return the lines of the file at path."""\n    lines = []\n'
NEW_TOKENS, REPEATS, MAX_LENGTH = 192, 7, 512
LEARNING_RUNS = 24


def loaded(case: str, device: str, attention: str = "sdpa") -> tuple[Any, list[int]]:
    """Return the model of a case and its prompt; the small model attends as its checkpoint says."""
    if case == "small":
        model, tokenizer = load_small_model(device=device)
        return model, prompt_tokens(tokenizer, PROMPT)
    model = random_model(case, device, attention)
    return model, torch.randint(0, model.config.vocab_size, (128,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.no_grad()
def eager_text(model: Any, prompt: list[int]) -> list[int]:
    """Return the model's own greedy text."""
    ids = torch.tensor([prompt], device=model.device)
    more = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **more)[0, len(prompt) :].tolist()


@torch.no_grad()
def worst_gap(model: Any, prompt: list[int], text: list[int]) -> float:
    """Return by how much a token of ``text`` scores less than the best in float32, in units of plain bf16's error."""
    ids = torch.tensor([prompt + text], device=model.device)
    rounded = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    exact = model.float()(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    gap = exact.amax(-1) - exact.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return float(gap.max() / (rounded - exact).square().mean().sqrt())


class Plain:
    """Stock compiled decoding, one token a step."""

    def __init__(self, model: Any, prompt: list[int]) -> None:
        self.model, self.prompt = model, torch.tensor([prompt], device=model.device)
        self.cache = StaticCache(config=model.config, max_cache_len=MAX_LENGTH)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        self.position = torch.zeros_like(self.token)

        def next_token(token: torch.Tensor, position: torch.Tensor, cache: Any) -> torch.Tensor:
            arguments = {"input_ids": token, "position_ids": position, "use_cache": True, CACHE_KEYWORD: cache}
            return model(**arguments).logits.argmax(-1)

        self.step = torch.compile(next_token, mode="reduce-overhead", dynamic=False)

    @torch.no_grad()
    def run(self) -> tuple[list[int], list[float]]:
        """Return a text and the milliseconds of each token."""
        self.cache.reset()
        arguments = {"use_cache": True, "logits_to_keep": 1, CACHE_KEYWORD: self.cache}
        self.token.copy_(self.model(input_ids=self.prompt, **arguments).logits.argmax(-1))
        self.position.fill_(self.prompt.shape[1])
        tokens = self.token.new_zeros(NEW_TOKENS)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(NEW_TOKENS)]
        for i, mark in enumerate(marks):
            tokens[i : i + 1].copy_(self.token[0])
            mark.record()
            if i + 1 < NEW_TOKENS:
                torch.compiler.cudagraph_mark_step_begin()
                self.token.copy_(self.step(self.token, self.position, self.cache))
                self.position.add_(1)
        torch.cuda.synchronize()
        return tokens.tolist(), [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


class Speculative:
    """``treewy.generate`` with one shape of tree."""

    def __init__(self, model: Any, prompt: list[int], widths: tuple[int, ...], chance: float | None) -> None:
        self.model, self.prompt, self.widths = model, prompt, widths
        self.drafter: Any = "mtp" if chance is None else OracleDrafter(model, len(prompt), chance)
        self.cache = treewy.TreeCache(
            model.config, 1, MAX_LENGTH, len(treewy.DraftTree.from_widths(widths)), device=model.device
        )

    def learn(self, text: list[int]) -> list[int]:
        """Return the text that these steps decode when the oracle knows that text, or nearly: rounding differs by tree."""
        for _ in range(LEARNING_RUNS):
            self.drafter.know(self.prompt + text)
            known, text = text, self.run()[0]
            if known == text:
                break
        return text

    def run(self) -> tuple[list[int], list[float], GenerationStatistics]:
        """Return a text, the milliseconds of each step, and what happened."""
        self.cache.reset()
        seen, marks = GenerationStatistics(), [0.0]
        out = treewy.generate(
            self.model, [self.prompt], max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
            drafter=self.drafter, draft_tree_widths=self.widths, statistics=seen,
            on_tokens=lambda *_: marks.append(time.perf_counter()), **{CACHE_KEYWORD: self.cache},
        )  # fmt: skip
        steps = [1e3 * (b - a) for a, b in itertools.pairwise(marks[1:])]
        return out[0, len(self.prompt) :].tolist(), steps, seen


def measure(case: str, widths: tuple[int, ...], barrier: Any, turn: Any, results: Any, device: str = "cuda") -> None:
    """Compile, check, wait for the others, then time alone; puts one row into ``results``."""
    row: dict[str, Any] = {"model": case, "widths": list(widths)}
    try:
        model, prompt = loaded(case, device, "treewy" if widths else "sdpa")
        started = time.perf_counter()
        if widths:
            chance = None if case == "small" else chance_of(widths, RESULTS)
            runner: Any = Speculative(model, prompt, widths, chance)
        else:
            runner = Plain(model, prompt)
        text = runner.run()[0]
        row["first_run_s"] = round(time.perf_counter() - started, 1)
        if case == "small":
            row["equal"] = text == eager_text(model, prompt)
        else:
            text = runner.learn(text) if widths else text
            row["worst_gap"] = round(worst_gap(loaded(case, device)[0], prompt, text), 2)
            row["equal"] = row["worst_gap"] <= 8 and runner.run()[0] == text
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    barrier.wait()
    with turn:
        if row.get("equal"):
            row |= timed(runner)
    results.put(row)


def timed(runner: Plain | Speculative) -> dict[str, Any]:
    """Return tokens a second by run, and milliseconds of a step over all runs."""
    runner.run()
    speeds, steps, row = [], [], {}
    for _ in range(REPEATS):
        _, milliseconds, *seen = runner.run()
        steps += milliseconds
        if seen:
            speeds.append(seen[0].tokens / (seen[0].draft_seconds + seen[0].verify_seconds))
            row["tokens_per_step"] = round(seen[0].tokens_per_step, 3)
        else:
            speeds.append(1e3 * len(milliseconds) / sum(milliseconds))
            row["tokens_per_step"] = 1.0
    speeds, step = sorted(speeds), Timing.of(sorted(steps))
    row |= {"tokens_per_second": round(median(speeds), 1), "slowest": round(speeds[0], 1), "fastest": round(speeds[-1], 1)}
    return row | {"step_ms": round(step.median, 3), "step_p10": round(step.p10, 3), "step_p90": round(step.p90, 3)}


def tabulate(row: dict[str, Any], plain: dict[str, Any] | None) -> str:
    """Return one line of the report."""
    head = f"{row['model']:>5} {','.join(map(str, row['widths'])) or 'plain':>6}"
    if "error" in row:
        return f"{head}  {row['error']}"
    if not row["equal"]:
        return f"{head}  wrong: {'worst gap ' + str(row['worst_gap']) if 'worst_gap' in row else 'another text'}"
    ratio = f"{row['tokens_per_second'] / plain['tokens_per_second']:6.2f}" if plain else ""
    return (
        f"{head} {row['step_ms']:8.3f} ({row['step_p10']:.3f}-{row['step_p90']:.3f}) {row['tokens_per_step']:6.2f} "
        f"{row['tokens_per_second']:8.1f} ({row['slowest']:.0f}-{row['fastest']:.0f}) {ratio}"
    )


def main() -> None:
    """Run the cases and write tokens_per_second.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="small,0.8B")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    cases = [(case, widths) for case in options.cases.split(",") for widths in SHAPES]
    context = multiprocessing.get_context("spawn")
    barrier, turn, results = context.Barrier(len(cases)), context.Lock(), context.Queue()
    workers = [context.Process(target=measure, args=(*case, barrier, turn, results)) for case in cases]
    for worker in workers:
        worker.start()
    machine = machine_line("fp32 small, bf16 0.8B")
    print(machine, flush=True)
    print("model   tree  step ms (p10-p90)    tokens/step  tokens/s (runs)  ratio", flush=True)
    rows = []
    for _ in workers:
        rows.append(results.get())
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    rows.sort(key=lambda row: cases.index((row["model"], tuple(row["widths"]))))
    for worker in workers:
        worker.join()
    plain = {row["model"]: row for row in rows if not row["widths"] and "tokens_per_second" in row}
    for row in rows:
        print(tabulate(row, plain.get(row["model"])))
    for case, base in plain.items():
        found = [row for row in rows if row["model"] == case and "tokens_per_second" in row]
        best = max(found, key=lambda row: row["tokens_per_second"])
        name = f"trees {tuple(best['widths'])}" if best["widths"] else "plain decoding"
        print(f"{case}: {name} give most, {best['tokens_per_second'] / base['tokens_per_second']:.2f} times plain decoding.")
    report = {"machine": machine, "date": time.strftime("%Y-%m-%d"), "new_tokens": NEW_TOKENS, "repeats": REPEATS, "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "tokens_per_second.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
