"""What ``treewy demo`` runs and reports: streamed text, then one table of figures measured in this very run."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from treewy_inductor import records
from treewy_inductor.generation import generate
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.layer_shapes import LinearShape
from treewy_inductor.models.families import shapes_of_layers
from treewy_inductor.models.load_model import prompt_tokens
from treewy_inductor.models.model_verifier import borrowed_cache
from treewy_inductor.models.path_check import largest_path_error
from treewy_inductor.token_painter import TokenPainter, show_legend
from treewy_inductor.tree import DraftTree

_RECURRENCES = ("gated_delta", "linear_attention")
# Relative error of fp32 logits that rounding alone explains; bf16 rounds 2 ** 16 times more coarsely.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 2e-2}


@dataclass
class Demonstration:
    """Everything the table shows."""

    statistics: GenerationStatistics
    nodes: int
    equal_tokens: int
    tokens: int
    is_exact: bool
    path_error: float
    tolerance: float
    state_bytes: int
    leavings_bytes: int
    graphs: int
    proven: int
    linear_layers: int
    first_step_seconds: float
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether the checks of the run passed; plain decoding has to be matched only in float32."""
        is_equal = self.equal_tokens == self.tokens or not self.is_exact
        return is_equal and self.path_error <= self.tolerance and self.proven == self.linear_layers


def demonstrate(
    console: Console,
    model: Any,
    tokenizer: Any,
    prompt: str,
    new_tokens: int,
    widths: tuple[int, ...],
    drafter: Any,
    options: dict[str, Any],
) -> Demonstration:
    """Generate from ``prompt``, streaming to ``console``, and check the result against the model alone."""
    started = time.perf_counter()
    shape = DraftTree.from_widths(widths)
    nodes = max(2, len(shape))
    _introduce(console, model, widths, nodes, options)
    ids = prompt_tokens(tokenizer, prompt)
    painter = TokenPainter(console, lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))
    statistics = GenerationStatistics()
    steps: list[float] = []

    def on_tokens(row: int, tokens: list[int], accepted: int) -> None:
        steps.append(time.perf_counter())
        if len(steps) == 1:
            status.stop()
            painter.prompt(ids)
        painter(row, tokens, accepted)

    status = console.status("tracing the model, proving its recurrences and running the first tree ...")
    status.start()
    try:
        with records.collect() as found:
            out = generate(
                model, [ids], max_new_tokens=new_tokens, do_sample=False, drafter=drafter, draft_tree_widths=widths,
                statistics=statistics, on_tokens=on_tokens, compile_options=options,
            )  # fmt: skip
    finally:
        status.stop()
    painter.end()
    text = out[0].tolist()
    equal = _equal_to_plain(model, ids, text)
    noise = random.Random(0)
    drafted = [text[-1]] + [noise.randrange(model.config.get_text_config().vocab_size) for _ in range(len(shape) - 1)]
    room = len(ids) + new_tokens
    with records.collect() as found_again:
        error = largest_path_error(model, text[:-1], DraftTree(shape.parents, drafted), options, room, drafter == "mtp")
    with borrowed_cache(model, 1, room, nodes) as cache:
        state = cache.state.numel() * cache.state.element_size()
        left = sum(t.numel() * t.element_size() for t in cache.states.tensors().values()) - state
        linear = cache.linear_layers
    rewritten = (record for record in found + found_again if isinstance(record, records.Proven))
    # A graph proves every layer once. Dynamo's own count has the small functions beside the model as well: those on a GPU.
    proven = Counter(record.layer for record in rewritten if record.kind in _RECURRENCES)
    graphs = max(proven.values(), default=0)
    return Demonstration(
        statistics=statistics, nodes=nodes, equal_tokens=equal, tokens=len(text) - len(ids),
        is_exact=model.dtype == torch.float32, path_error=error, tolerance=_TOLERANCE[model.dtype], state_bytes=state,
        leavings_bytes=left, graphs=graphs, proven=len(proven), linear_layers=linear,
        first_step_seconds=steps[0] - started, seconds=time.perf_counter() - started,
    )  # fmt: skip


def _introduce(console: Console, model: Any, widths: tuple[int, ...], nodes: int, options: dict[str, Any]) -> None:
    shapes = shapes_of_layers(model.config.get_text_config(decoder=True))
    linear = sum(isinstance(shape, LinearShape) for shape in shapes)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    how = "op by op, no code generated" if options else "as code that Inductor generates"
    console.print(
        f"[bold]{type(model).__name__}[/], unmodified: {parameters / 1e6:.1f} M parameters, {linear} layers with a recurrent "
        f"state, {len(shapes) - linear} of attention, {str(model.dtype).removeprefix('torch.')} on {model.device}\n"
        f"Each step verifies a tree of {nodes} tokens, {widths} children a level, in one forward; the rewritten graph runs "
        f"{how}."
    )
    show_legend(console)


@torch.no_grad()
def _equal_to_plain(model: Any, ids: list[int], text: list[int]) -> int:
    """Return how many tokens of ``text`` are those of the model's own greedy decoding before the first that is not."""
    prompt = torch.tensor([ids], device=model.device)
    own = model.generate(prompt, max_new_tokens=len(text) - len(ids), do_sample=False, attention_mask=torch.ones_like(prompt))
    pairs = list(zip(own[0, len(ids) :].tolist(), text[len(ids) :], strict=False))
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))


def report(console: Console, result: Demonstration) -> None:
    """Print the table and, as the last line of stdout, its figures as JSON."""
    seen = result.statistics
    table = Table(show_header=False, title="Measured in this run", title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    shares = ", ".join(f"{share:.0%}" for share in seen.acceptance_by_depth)
    whole = f"all {result.tokens}" if result.equal_tokens == result.tokens else f"{result.equal_tokens} of {result.tokens}"
    rows = (
        (
            "tokens per step",
            f"{seen.tokens_per_step:.2f}",
            f"{seen.tokens} in {seen.steps} forwards; accepted by depth {shares}",
        ),
        ("same as plain decoding", whole, "tokens, greedy, the model's own generate"),
        (
            "tree against its paths",
            f"{result.path_error:.1e}",
            f"largest relative error of {result.nodes} random nodes' logits",
        ),
        (
            "state kept",
            _size(result.state_bytes),
            f"and {_size(result.leavings_bytes)} for the tree in flight; a copy a node is "
            f"{_size(result.nodes * result.state_bytes)}",
        ),
        ("graphs compiled", str(result.graphs), "for all trees and lengths of this run"),
        ("recurrences proven", f"{result.proven} of {result.linear_layers}", "each run in float64 against the literal rule"),
        (
            "time",
            f"{result.seconds:.0f} s",
            f"{result.first_step_seconds:.0f} s until the first tokens, then {1e3 * seen.later_step_seconds:.0f} ms a step",
        ),
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)
    figures = {
        "tokens_per_step": round(seen.tokens_per_step, 3), "equal_tokens": result.equal_tokens, "tokens": result.tokens,
        "path_error": result.path_error, "state_bytes": result.state_bytes, "graphs": result.graphs,
        "copies_bytes": result.nodes * result.state_bytes, "proven": result.proven, "seconds": round(result.seconds, 1),
        "ok": result.is_right,
    }  # fmt: skip
    print(json.dumps(figures))


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"
