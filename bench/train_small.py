"""Train the small model that the package ships: a Qwen3.5 text model and its prediction layer, within a time budget.

    python -m bench.train_small --out FOLDER [--library FOLDER] [--seconds 390]

Text: Python's standard library (bench/library_text.py). Learning rate and duration follow the clock, so that the schedule
ends with the budget whatever the machine. The checkpoint with the least validation loss is kept. At the end, held-out
losses of the stored (bf16) weights are printed beside an interpolated trigram model's on the same tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from bench.library_text import LibraryText, read_library
from bench.machine import machine_line
from bench.prediction_depths import DEPTHS, distillation_losses, unrolled
from bench.small_architecture import END_OF_TEXT, restore_small, save_small, small_config, small_model
from bench.trigram import Trigram
from treewy_inductor.models.multi_token_prediction import MultiTokenPrediction

LENGTH = 512
PREDICTION_WEIGHT = 0.1
WARMUP = 0.03
VALIDATION_EVERY = 40.0
SAMPLE_PROMPTS = ("def __init__(self, ", "import os\n", "    The function returns ", "class Test")


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> np.ndarray:
    """Return all documents as one ``[T]`` int64 sequence, the end-of-text token before each and at the end."""
    end = tokenizer.eos_token_id
    ids = [end]
    for encoding in tokenizer.backend_tokenizer.encode_batch(documents, add_special_tokens=False):
        ids.extend(encoding.ids)
        ids.append(end)
    return np.asarray(ids, dtype=np.int64)


def windows(tokens: np.ndarray) -> np.ndarray:
    """Cut ``[T]`` into ``[W, LENGTH]``, what is left over at the end dropped."""
    count = len(tokens) // LENGTH
    return tokens[: count * LENGTH].reshape(count, LENGTH)


def losses_of(
    model: PreTrainedModel, prediction: MultiTokenPrediction, tokens: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the model's loss on ``tokens [B, T]`` in nats, and per depth the prediction's loss and agreement."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden)
    own = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
    return own, *distillation_losses(logits, unrolled(prediction, tokens, hidden))


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, prediction: MultiTokenPrediction, rows: np.ndarray, device: str, batch: int
) -> dict[str, float]:
    """Return the mean loss over ``rows [W, LENGTH]`` and, per depth, how often the prediction says what the model says."""
    model.eval(), prediction.eval()
    total = np.zeros(1 + DEPTHS)
    for start in range(0, len(rows), batch):
        tokens = torch.from_numpy(rows[start : start + batch]).to(device)
        own, _, agreements = losses_of(model, prediction, tokens)
        total += len(tokens) * np.array([own.item(), *(agreement.item() for agreement in agreements)])
    model.train(), prediction.train()
    total /= len(rows)
    return {"loss": total[0], **{f"agreement_{depth}": total[depth] for depth in range(1, DEPTHS + 1)}}


def add_dropout(module: nn.Module, probability: float) -> None:
    """Drop out what every sublayer adds to the residual stream, in training only; the saved model knows nothing of it."""
    for name, part in module.named_modules():
        if name.endswith(("o_proj", "out_proj", "down_proj", "embed_tokens")):
            part.register_forward_hook(lambda m, args, output: F.dropout(output, probability, m.training))


def optimizer_of(*modules: nn.Module, rate: float, decay: float) -> torch.optim.AdamW:
    parameters = {id(p): p for module in modules for p in module.parameters()}.values()
    matrices, others = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=matrices[0].is_cuda)


def train(
    model: PreTrainedModel,
    prediction: MultiTokenPrediction,
    tokenizer: PreTrainedTokenizerFast,
    tokens: np.ndarray,
    validation: np.ndarray,
    options: argparse.Namespace,
) -> list[dict[str, float]]:
    """Train until the budget is spent, the best checkpoint in ``options.out``; return the log."""
    device, generator = options.device, torch.Generator(device=options.device).manual_seed(options.seed)
    text = torch.from_numpy(tokens.astype(np.int16)).to(device)
    window = torch.arange(LENGTH, device=device)
    optimizer = optimizer_of(model, prediction, rate=options.rate, decay=options.decay)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    add_dropout(model, options.dropout), add_dropout(prediction, options.dropout)
    model.train(), prediction.train()
    log: list[dict[str, float]] = []
    best, step, skipped, begin, validated = math.inf, 0, 0, time.monotonic(), 0.0
    while True:
        elapsed = time.monotonic() - begin
        fraction = min(elapsed / options.seconds, 1.0)
        is_due = fraction >= 1.0 or elapsed - validated >= VALIDATION_EVERY if validated else step == 20
        if is_due:
            validated = elapsed
            scores = evaluate(model, prediction, validation, device, options.batch)
            epochs = step * options.batch * LENGTH / len(tokens)
            log.append({"seconds": elapsed, "step": step, "epochs": epochs, **scores})
            print(" ".join(f"{name} {value:.4g}" for name, value in log[-1].items()), flush=True)
            score = scores["loss"] - PREDICTION_WEIGHT * sum(scores[f"agreement_{d}"] for d in range(1, DEPTHS + 1))
            if score < best:
                best = score
                save_small(options.out, model, prediction, tokenizer)
        if fraction >= 1.0 and validated:
            return log
        scale = min(fraction / WARMUP, 1.0) * (0.02 + 0.98 * (1 + math.cos(math.pi * fraction)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = options.rate * max(scale, 1e-3)
        start = torch.randint(len(text) - LENGTH, (options.batch, 1), device=device, generator=generator)
        own, drafted, _ = losses_of(model, prediction, text[start + window].long())
        (own + PREDICTION_WEIGHT * sum(drafted)).backward()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        # Reading the norm is the step's one wait for the device: the clock then tells when the work is done.
        if math.isfinite(norm.item()):
            optimizer.step()
        else:
            skipped += 1
            print(f"step {step}: gradient norm {norm.item()}, skipped", flush=True)
            if skipped > 50:
                raise FloatingPointError(f"{skipped} steps had no finite gradient: lower --rate {options.rate}")
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 200 == 0 or step == 5:
            speed = step * options.batch * LENGTH / (time.monotonic() - begin)
            print(
                f"step {step} loss {own.item():.3f} drafts {[round(d.item(), 3) for d in drafted]} {speed:.0f} tokens/s",
                flush=True,
            )


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, device: str) -> list[str]:
    model.eval()
    texts = []
    for prompt in SAMPLE_PROMPTS:
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]], device=device)
        torch.manual_seed(0)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, do_sample=True, top_p=0.9, temperature=0.8
        )
        texts.append(tokenizer.decode(output[0, 1:]))
    return texts


def part(text: LibraryText, name: str, options: argparse.Namespace) -> list[str]:
    documents = getattr(text, name)
    return documents[:: max(1, len(documents) // 12)] if options.tiny else documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and training.json")
    parser.add_argument("--library", type=Path, help="a standard library's folder; default: this Python's own")
    parser.add_argument("--seconds", type=float, default=390.0, help="training time; reading and evaluation come on top")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=32, help=f"windows of {LENGTH} tokens per step")
    parser.add_argument("--rate", type=float, default=2.5e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a few documents, to try the script")
    options = parser.parse_args()
    begin = time.monotonic()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    print(machine_line("fp32 (tf32 products)"), flush=True)

    text = read_library(options.library)
    train_documents = part(text, "train", options)
    tokenizer = train_tokenizer(train_documents, options.vocabulary)
    tokens = encode(tokenizer, train_documents)
    validation, held_out = (windows(encode(tokenizer, part(text, name, options))) for name in ("validation", "held_out"))
    size = sum(map(len, train_documents))
    print(
        f"{size / 1e6:.1f} MB of text, {len(tokens)} tokens, {size / len(tokens):.2f} bytes a token; validation "
        f"{validation.size}, held out {held_out.size} tokens; {time.monotonic() - begin:.0f} s",
        flush=True,
    )

    model, prediction = small_model(small_config(len(tokenizer), tokenizer.eos_token_id, tiny=options.tiny))
    model.to(options.device), prediction.to(options.device)
    count = sum(p.numel() for p in {*model.parameters(), *prediction.parameters()})
    print(f"{count} parameters, {sum(p.numel() for p in prediction.parameters())} of them the prediction layer's", flush=True)
    log = train(model, prediction, tokenizer, tokens, validation, options)

    restore_small(options.out, model, prediction)
    torch.set_float32_matmul_precision("highest")
    scores = evaluate(model, prediction, held_out, options.device, options.batch)
    trigram = Trigram(tokens, len(tokenizer)).losses(held_out)[:, 1:].mean()
    samples = sample(model, tokenizer, options.device)
    for written in samples:
        print("-" * 40, written, sep="\n")
    report = {
        "model_loss": scores.pop("loss"),
        "trigram_loss": float(trigram),
        **scores,
        "parameters": count,
        "training_tokens": len(tokens),
        "held_out_tokens": held_out.size,
        "epochs": log[-1]["epochs"],
        "seconds": time.monotonic() - begin,
    }
    settings = {
        name: value.name if isinstance(value, Path) else value for name, value in vars(options).items() if name != "out"
    }
    (options.out / "training.json").write_text(
        json.dumps({"report": report, "settings": settings, "log": log, "samples": samples}, indent=1)
    )
    print(f"Held-out loss {report['model_loss']:.4f} nats a token, the trigram's {trigram:.4f}.")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
