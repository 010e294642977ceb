"""Is speculative decoding lossless?

    python -m bench.lossless [--rows 100000] [--model FOLDER] [--out bench/results/lossless.json]

Enumeration: the acceptance rules, run through every decision, on all trees up to 7 nodes and vocabularies of 3 to 5.
Chi-square: texts sampled by the decoding loop from a known target, drawn trees, five seeds.
Forced rejection: a drafter that is always wrong, 500 steps, against plain decoding in fp32; in bf16 the chosen tokens' scores
against the fp32 model's, beside plain bf16 decoding's.
Accept length: greedy, with the model's own prediction layer, if the model is there.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import treewy_inductor as treewy
from bench.enumerate_acceptance import largest_distance
from bench.machine import machine_line
from bench.markov_text import MarkovDrafter, MarkovVerifier, random_chain
from treewy_inductor.decoding import decode
from treewy_inductor.decoding_plan import DecodingPlan
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.models.load_model import load_model, prompt_tokens
from treewy_inductor.tree import DraftTree

VOCABULARY, LENGTH = 4, 4
FAST: dict[str, Any] = {"options": {"treewy.codegen": False}}


def chi_square_p(observed: Tensor, expected: Tensor) -> float:
    """Return how probable a larger chi-square is; cells with fewer than 8 expected are taken together."""
    rare = expected < 8
    if rare.any():
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic.double() / 2))


def enumerate_all(largest: int) -> tuple[float, int]:
    worst, trees = 0.0, 0
    generator = torch.Generator().manual_seed(0)
    for vocabulary, nodes in itertools.product((3, 4, 5), range(1, largest + 1)):
        distance, count = largest_distance(vocabulary, nodes, generator)
        worst, trees = max(worst, distance), trees + count
    return worst, trees


def sampled_p(seed: int, rows: int) -> float:
    """Return the p of ``rows`` texts sampled by the loop with trees drawn from another distribution."""
    target = random_chain(VOCABULARY, 10 + seed)
    drafter = MarkovDrafter(target + 0.8 * random_chain(VOCABULARY, 20 + seed))
    after = target.softmax(-1)
    expected = torch.ones(1, dtype=torch.float64)
    before = torch.tensor([[0, 1]])
    for _ in range(LENGTH):
        expected = (expected[:, None] * after[before[:, 0], before[:, 1]]).reshape(-1)
        tokens = torch.arange(VOCABULARY).repeat(len(before))
        before = torch.stack([before[:, 1].repeat_interleave(VOCABULARY), tokens], 1)
    seeds = list(range(seed * 10**9, seed * 10**9 + rows))
    plan = DecodingPlan([[0, 1]] * rows, [0] * rows, [LENGTH] * rows, widths=(2, 2), seeds=seeds)
    decoded = decode(MarkovVerifier(target, rows, 7), drafter, plan)
    place = torch.tensor([VOCABULARY ** (LENGTH - 1 - i) for i in range(LENGTH)])
    observed = torch.bincount((torch.tensor(decoded.tokens) * place).sum(1), minlength=VOCABULARY**LENGTH)
    return chi_square_p(observed.double(), expected * rows)


class AlwaysWrong:
    """Drafts a chain whose first token is not the one the text has next."""

    def __init__(self, text: list[int], vocabulary: int) -> None:
        self.text, self.vocabulary = text, vocabulary

    def __call__(self, tokens: list[int]) -> DraftTree:
        known = self.text[len(tokens)] if len(tokens) < len(self.text) else 0
        return DraftTree([-1, 0, 1], [tokens[-1], (known + 1) % self.vocabulary, 0])


def forced_rejection(model: Any, prompt: list[int], steps: int) -> tuple[bool, float]:
    """Return whether fp32 text equals plain decoding's, and bf16's score error over that of plain bf16 decoding."""
    # An argument of None would be replaced by the configuration's end token, which would end the text early.
    model.generation_config.eos_token_id = None
    arguments: dict[str, Any] = {"max_new_tokens": steps, "do_sample": False, "pad_token_id": 0}
    ids = torch.tensor([prompt])
    # Without a mask transformers would take the token that begins the text for padding.
    mask = {"attention_mask": torch.ones_like(ids)}
    text = model.generate(ids, **mask, **arguments)[0].tolist()
    seen = GenerationStatistics()
    tree = {"draft_tree_widths": (1, 1), "compile_options": FAST, "statistics": seen}
    own = treewy.generate(model, [prompt], drafter=AlwaysWrong(text, model.config.vocab_size), **tree, **arguments)
    is_equal = own[0].tolist() == text and seen.steps == steps

    low = copy.deepcopy(model).bfloat16()
    scored = {"return_dict_in_generate": True, "output_logits": True}
    plain = low.generate(ids, **mask, **arguments, **scored)
    known = plain.sequences[0].tolist()
    forced = treewy.generate(low, [prompt], drafter=AlwaysWrong(known, model.config.vocab_size), **tree, **arguments, **scored)
    ratio = _score_error(model, forced, len(prompt)) / _score_error(model, plain, len(prompt))
    return is_equal, ratio


@torch.no_grad()
def _score_error(model: Any, output: Any, prompt: int) -> float:
    exact = model(output.sequences).logits[0, prompt - 1 : -1].double()
    found = torch.cat([logits.double() for logits in output.logits])
    return float(((found - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())


def accept_lengths(model: Any, prompts: list[list[int]], drafter: Any, tokens: int) -> dict[str, dict[str, float]]:
    """Return tokens per step with their 95% interval, by widths."""
    found = {}
    for widths in ((1, 1, 1), (2, 2, 2), (3, 3, 3)):
        seen = GenerationStatistics()
        treewy.generate(
            model, prompts, max_new_tokens=tokens, do_sample=False, drafter=drafter, draft_tree_widths=widths,
            statistics=seen, compile_options=FAST,
        )  # fmt: skip
        squares = sum(count * emitted**2 for emitted, count in seen.tokens_by_step.items()) / seen.steps
        spread = 1.96 * math.sqrt((squares - seen.tokens_per_step**2) / seen.steps)
        found[",".join(map(str, widths))] = {"mean": round(seen.tokens_per_step, 3), "interval": round(spread, 3)}
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=100_000)
    options.add_argument("--nodes", type=int, default=7)
    options.add_argument("--steps", type=int, default=500)
    options.add_argument("--model", default=str(Path(treewy.__file__).parent / "small_model"))
    options.add_argument("--out", type=Path, help="file for the result as JSON")
    given = options.parse_args()
    machine = machine_line("fp32 and bf16") + " | treewy.codegen off"
    print(machine)
    figures: dict[str, Any] = {}
    started = time.perf_counter()

    def line(name: str, answer: str) -> None:
        print(f"{name:18} {answer}   ({time.perf_counter() - started:.0f} s)", flush=True)

    figures["enumeration_max_tv"], trees = enumerate_all(given.nodes)
    line("enumeration", f"largest total variation {figures['enumeration_max_tv']:.1e} over {trees} trees, drawn and fixed")
    figures["chi2_p"] = [round(sampled_p(seed, given.rows), 4) for seed in range(1, 6)]
    line("chi-square", f"p {figures['chi2_p']} of {given.rows} texts of {LENGTH} tokens each")
    model, tokenizer = load_model(given.model, device="cpu")
    prompt = prompt_tokens(tokenizer, "def read_lines(path):\n")
    is_equal, ratio = forced_rejection(model, prompt, given.steps)
    figures["forced_reject_equal"], figures["forced_reject_bf16_ratio"] = is_equal, round(ratio, 4)
    line("forced rejection", f"{given.steps} steps equal: {is_equal}; bf16 score error {ratio:.3f} of plain bf16's")
    sources = ("import os\n\ndef ", "class Node:\n    def __init__(self", "    for name in names:\n", "def test_")
    prompts = [prompt_tokens(tokenizer, source) for source in sources]
    lengths = accept_lengths(model, prompts, "mtp", 64)
    line("accept length", "  ".join(f"({name}) {one['mean']}+-{one['interval']}" for name, one in lengths.items()))
    figures["accept_length"] = {name: one["mean"] for name, one in lengths.items()}
    is_lossless = figures["enumeration_max_tv"] < 1e-12 and all(0.001 < p < 0.999 for p in figures["chi2_p"]) and is_equal
    print("Speculative decoding is lossless here." if is_lossless else "wrong: a check above failed.")
    if given.out is not None:
        kept = {"machine": machine, "date": time.strftime("%Y-%m-%d"), "rows": given.rows, "steps": given.steps} | figures
        given.out.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
