"""Accepted tokens against the cost of a step, for several tree shapes on one model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
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
        step_ms: drafting, verifying, accepting and committing.
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
    rounds: int = 3,
) -> list[ShapeCost]:
    """Return the figures of decoding without drafts and of every shape.

    After a run of each that compiles it, all take turns ``rounds`` times, so that a machine that slows down slows all of them;
    a step's time is the median of its rounds.
    """

    def run(widths: tuple[int, ...]) -> tuple[list[list[int]], GenerationStatistics]:
        seen = GenerationStatistics()
        out = generate(
            model, prompts, max_new_tokens=new_tokens, do_sample=False, draft_tree_widths=widths, eos_token_id=None,
            drafter=drafter if widths else _Nothing(), compile_options=options, statistics=seen,
        )  # fmt: skip
        return out.tolist(), seen

    compared = list(dict.fromkeys([(), *shapes]))
    texts = {widths: run(widths)[0] for widths in compared}
    seen = [{widths: run(widths)[1] for widths in compared} for _ in range(rounds)]
    found = []
    for widths in compared:
        own = [one[widths] for one in seen]
        step = median((one.draft_seconds + one.verify_seconds) / one.forwards for one in own)
        rate = own[0].tokens / own[0].forwards / step
        nodes = max(2, len(DraftTree.from_widths(widths)))
        found.append(ShapeCost(widths, nodes, 1e3 * step, own[0].tokens_per_step, rate, texts[widths] == texts[()]))
    return found


def report(console: Console, found: Sequence[ShapeCost], model: Any, drafter: str) -> None:
    """Print the table, what it says, and its figures as one JSON line."""
    base = found[0]
    dtype = str(model.dtype).removeprefix("torch.")
    console.print(f"{type(model).__name__} | {dtype} on {model.device} | drafts by {drafter}")
    table = Table()
    for name in ("tree", "nodes", "step ms", "tokens a step", "to break even", "tokens/s", "ratio"):
        table.add_column(name, justify="right")
    # Rounding may part texts of lower precision.
    right = [one for one in found if one.equal or dtype != "float32"]
    for one in found:
        name = ",".join(map(str, one.widths)) or "none"
        needed = one.step_ms / base.step_ms
        figures = [f"{one.step_ms:.2f}", f"{one.tokens_per_step:.2f}", f"{needed:.2f}", f"{one.tokens_per_second:.1f}"]
        ratio = f"{one.tokens_per_second / base.tokens_per_second:.2f}"
        table.add_row(name, str(one.nodes), *(figures if one in right else ["wrong"] * 4), ratio if one in right else "")
    console.print(table)
    console.print("none: one token a step through the same kind of step. To break even a tree needs that many tokens a step.")
    best = max(right, key=lambda one: one.tokens_per_second)
    if best is base:
        console.print("No tree pays here: each costs more than its accepted tokens bring. Decode without drafts.")
    else:
        console.print(
            f"{','.join(map(str, best.widths))} pays most, {best.tokens_per_second / base.tokens_per_second:.2f} times as fast "
            f"as none: {best.tokens_per_step:.2f} tokens a step, where {best.step_ms / base.step_ms:.2f} would break even."
        )
    shapes = [asdict(one) for one in found]
    for shape in shapes:
        shape |= {name: round(value, 4) for name, value in shape.items() if isinstance(value, float)}
    print(json.dumps({"drafter": drafter, "shapes": shapes, "best": list(best.widths)}))
