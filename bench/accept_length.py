"""How many tokens does a step of the shipped model give, with chains and with trees of its own prediction layer?

    python -m bench.accept_length [--prompts 50] [--tokens 64] [--quick] [--out bench/results/accept_length.json]

Greedy, fp32, on held-out text of this Python's standard library, the rewritten graph run op by op. Accept length: tokens per
verification of a row, the one that the model adds itself included. Intervals are of 95 %, from 10,000 bootstrap draws of
prompts, since steps of one text are not independent; differences are paired by prompt. Chain inside it: what the tree's
first children alone would have given at the same step, which no step of the tree may fall below.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import numpy as np

from bench.held_out_drafting import WIDTHS, Drafting, draft_greedily, held_out_prompts
from bench.library_text import read_library
from bench.machine import machine_line
from bench.train_small import encode
from treewy_inductor.models.small_model import load_small_model

DRAWS = 10_000


def bootstrapped(run: Drafting, draws: np.ndarray) -> np.ndarray:
    """Return ``[DRAWS]`` accept lengths, each of the prompts ``draws [DRAWS, P]``."""
    tokens = np.array([sum(row) for row in run.by_tree])
    steps = np.array([len(row) for row in run.by_tree])
    return tokens[draws].sum(1) / steps[draws].sum(1)


def interval(values: np.ndarray) -> list[float]:
    return [round(float(bound), 4) for bound in np.quantile(values, (0.025, 0.975))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each text")
    parser.add_argument("--batch", type=int, default=25, help="rows that are verified together")
    parser.add_argument("--quick", action="store_true", help="10 prompts, 24 tokens")
    parser.add_argument("--out", type=Path, help="file for the result as JSON")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens = 10, 24
    machine = machine_line("fp32") + " | treewy.codegen off"
    print(machine, flush=True)
    model, tokenizer = load_small_model()
    prompts = held_out_prompts(encode(tokenizer, read_library().held_out), options.prompts)
    draws = np.random.default_rng(0).integers(len(prompts), size=(DRAWS, len(prompts)))

    print("widths  nodes  accept length  95 % interval  more than before  chain inside it", flush=True)
    shapes = {}
    before = None
    for widths in WIDTHS:
        run = draft_greedily(model, prompts, widths, options.tokens, options.batch)
        lengths = bootstrapped(run, draws)
        gain = None if before is None else interval(lengths - before)
        low, high = interval(lengths)
        nodes = 1 + int(np.cumprod(widths).sum())
        print(
            f"{','.join(map(str, widths))} {nodes:7} {run.accept_length:14.3f}    {low:.3f}-{high:.3f} "
            f"{'' if gain is None else f'{gain[0]:+.3f} to {gain[1]:+.3f}':>17} {run.chain_inside:16.3f}",
            flush=True,
        )
        shapes[",".join(map(str, widths))] = {
            "nodes": nodes,
            "accept_length": round(run.accept_length, 4),
            "interval": [low, high],
            "gain_over_the_shape_before": gain,
            "chain_inside": round(run.chain_inside, 4),
            "steps": sum(map(len, run.by_tree)),
            "steps_below_the_chain_inside": run.steps_below_the_chain,
        }
        before = lengths
    values = [shape["accept_length"] for shape in shapes.values()]
    is_rising = all(a < b for a, b in itertools.pairwise(values))
    below = sum(shape["steps_below_the_chain_inside"] for shape in shapes.values())
    print(f"Accept length {'rises strictly' if is_rising else 'does not rise strictly'}; {below} steps below their chain.")
    result = {"machine": machine, "prompts": len(prompts), "tokens": options.tokens, "rising": is_rising, "shapes": shapes}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
