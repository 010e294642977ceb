"""Is the text of tree verification the model's own greedy text, token for token, and how many tokens does a step give?

    python -m bench.greedy_equal [--prompts 50] [--tokens 64] [--quick] [--out bench/results/greedy_equal.json]

The shipped model in fp32 continues held-out text of this Python's standard library. Reference: transformers' own greedy
``generate`` of each prompt alone. Against it: ``treewy.generate`` in batches of prompts of five lengths, drafts by the model's
prediction layer, the rewritten graph run op by op. A text that differs is shown with the reference's two best scores at the
first different token: rounding alone can only decide between scores that are nearly equal.

Held-out loss of the model and of an interpolated trigram model that counts this Python's training part, on the same tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bench.held_out_drafting import WIDTHS, draft_greedily, held_out_prompts, until_end
from bench.library_text import LibraryText, read_library
from bench.machine import machine_line
from bench.train_small import encode, windows
from bench.trigram import Trigram
from treewy_inductor.models.small_model import load_small_model


@torch.no_grad()
def plain_greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Return what ``model.generate`` gives for the prompt alone."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return until_end(out[0, len(prompt) :].tolist(), model.generation_config.eos_token_id)


@torch.no_grad()
def show_difference(model: Any, prompt: list[int], expected: list[int], found: list[int]) -> None:
    at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found)))
    best, tokens = model(torch.tensor([[*prompt, *expected[:at]]])).logits[0, -1].topk(2)
    print(
        f"    token {at}: expected {expected[at : at + 1]}, found {found[at : at + 1]}; plain scores {best.tolist()} of "
        f"{tokens.tolist()}"
    )


@torch.no_grad()
def held_out_losses(model: Any, tokenizer: Any, text: LibraryText, held_out: np.ndarray, count: int) -> tuple[float, float]:
    """Return mean losses in nats of the model and of the trigram model over ``count`` windows spread over ``held_out``."""
    rows = windows(held_out)
    rows = rows[:: max(1, len(rows) // count)][:count]
    trigram = Trigram(encode(tokenizer, text.train), len(tokenizer)).losses(rows)[:, 1:].mean()
    losses = []
    for row in torch.from_numpy(rows):
        losses.append(F.cross_entropy(model(row[None], use_cache=False).logits[0, :-1], row[1:]).item())
    print(f"losses on {rows.size} held-out tokens; training part of this library: {len(text.train)} documents")
    return float(np.mean(losses)), float(trigram)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each text")
    parser.add_argument("--batch", type=int, default=25, help="rows that are verified together")
    parser.add_argument("--windows", type=int, default=24, help="held-out windows of 512 tokens for the losses")
    parser.add_argument("--quick", action="store_true", help="6 prompts, 24 tokens, 4 windows")
    parser.add_argument("--out", type=Path, help="file for the result as JSON")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens, options.windows = 6, 24, 4
    machine = machine_line("fp32") + " | treewy.codegen off"
    print(machine, flush=True)
    model, tokenizer = load_small_model()
    text = read_library()
    held_out = encode(tokenizer, text.held_out)
    prompts = held_out_prompts(held_out, options.prompts)
    started = time.perf_counter()
    expected = [plain_greedy(model, prompt, options.tokens) for prompt in prompts]
    print(f"plain greedy, each prompt alone: {sum(map(len, expected))} tokens in {time.perf_counter() - started:.0f} s")

    print("widths   equal  accept length  chain inside it  steps    s", flush=True)
    equal, accept_length = 0, {}
    for widths in WIDTHS:
        found = draft_greedily(model, prompts, widths, options.tokens, options.batch)
        same = [new == own for new, own in zip(found.texts, expected, strict=True)]
        name = ",".join(map(str, widths))
        equal += sum(same)
        accept_length[name] = round(found.accept_length, 4)
        steps = sum(map(len, found.by_tree))
        print(
            f"{name}  {sum(same):3}/{len(same)} {found.accept_length:14.3f} {found.chain_inside:16.3f} {steps:6} "
            f"{found.seconds:4.0f}",
            flush=True,
        )
        for prompt, own, new, is_same in zip(prompts, expected, found.texts, same, strict=True):
            if not is_same:
                show_difference(model, prompt, own, new)
    model_loss, trigram_loss = held_out_losses(model, tokenizer, text, held_out, options.windows)
    of = len(WIDTHS) * len(prompts)
    print(f"{equal} of {of} texts equal the plain greedy text of the prompt alone.")
    losses = {"trigram_loss": round(trigram_loss, 4), "model_loss": round(model_loss, 4)}
    result: dict[str, Any] = {"equal": equal, "of": of, "accept_length": accept_length} | losses
    if options.out is not None:
        kept = {"machine": machine, "date": time.strftime("%Y-%m-%d"), "prompts": len(prompts), "tokens": options.tokens}
        options.out.write_text(json.dumps(kept | result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
