"""Accepted tokens against the cost of a step, for several tree shapes on one model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from treewy_inductor.drafting import DraftRequest
from treewy_inductor.generation import generate
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.tree import DraftTree


@dataclass
class ShapeCost:
    """One shape's figures.

    Args:
        widths: empty for decoding without drafts, through the same compiled step.
        nodes: of a verification.
        step_ms: drafting, verifying, accepting and committing, after the first step.
        tokens_per_step: of one row.
        tokens_per_second: of all rows.
        equal: whether the text is the one decoded without drafts.
    """

    widths: tuple[int, ...]
    nodes: int
    step_ms: float
    tokens_per_step: float
    tokens_per_second: float
    equal: bool


class _Nothing:
    def draft(self, request: DraftRequest) -> list[DraftTree]:
        return [DraftTree([-1], [tokens[-1]]) for tokens in request.tokens]


def compare_shapes(
    model: Any,
    prompts: list[list[int]],
    shapes: Sequence[tuple[int, ...]],
    new_tokens: int,
    drafter: Any,
    options: dict[str, Any],
) -> list[ShapeCost]:
    """Return the figures of decoding without drafts and of every shape, each measured after a run that compiled it."""
    found: list[ShapeCost] = []
    plain = None
    for widths in [(), *shapes]:
        own = drafter if widths else _Nothing()
        arguments: dict[str, Any] = {
            "do_sample": False,
            "draft_tree_widths": widths,
            "drafter": own,
            "compile_options": options,
        }
        generate(model, prompts, max_new_tokens=4, **arguments, eos_token_id=None)
        seen = GenerationStatistics()
        out = generate(model, prompts, max_new_tokens=new_tokens, **arguments, statistics=seen, eos_token_id=None).tolist()
        plain = out if plain is None else plain
        seconds = seen.draft_seconds + seen.verify_seconds
        found.append(
            ShapeCost(
                widths,
                max(2, len(DraftTree.from_widths(widths))),
                1e3 * seconds / seen.forwards,
                seen.tokens_per_step,
                seen.tokens_per_second,
                out == plain,
            )
        )
    return found


def report(console: Console, found: Sequence[ShapeCost], model: Any) -> None:
    """Print the table, what it says, and its figures as one JSON line."""
    base = found[0]
    console.print(f"{type(model).__name__} | {str(model.dtype).removeprefix('torch.')} on {model.device}")
    table = Table()
    for name in ("tree", "nodes", "step ms", "tokens a step", "to break even", "tokens/s", "ratio"):
        table.add_column(name, justify="right")
    for one in found:
        name = ",".join(map(str, one.widths)) or "none"
        needed = one.step_ms / base.step_ms
        figures = [f"{one.step_ms:.2f}", f"{one.tokens_per_step:.2f}", f"{needed:.2f}", f"{one.tokens_per_second:.1f}"]
        ratio = f"{one.tokens_per_second / base.tokens_per_second:.2f}"
        is_right = one.equal or str(model.dtype) != "torch.float32"
        table.add_row(name, str(one.nodes), *(figures if is_right else ["wrong"] * 4), ratio if is_right else "")
    console.print(table)
    best = max(found, key=lambda one: one.tokens_per_second)
    if best is base:
        console.print("No tree pays here: each costs more than its accepted tokens bring. Decode without drafts.")
    else:
        console.print(
            f"{','.join(map(str, best.widths))} pays most: {best.tokens_per_step:.2f} tokens a step, where "
            f"{best.step_ms / base.step_ms:.2f} would break even."
        )
    print(json.dumps({"shapes": [asdict(one) for one in found], "best": list(best.widths)}))
