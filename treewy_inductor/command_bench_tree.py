"""``treewy bench-tree``: which tree shape pays on a model, since a wide tree can lose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treewy_inductor.command_options import Codegen, Device, Drafter, Model, told_in_one_sentence


@told_in_one_sentence()
def bench_tree(
    model: Model = "",
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    prompt_file: Annotated[Path | None, typer.Option(help="File with the text to go on from.")] = None,
    shapes: Annotated[str, typer.Option(help="Widths of the trees to compare.")] = "1,1,1 2,2,2 3,3,3",
    new_tokens: Annotated[int, typer.Option(min=8, help="Tokens to generate with each shape.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Rows, all with the same prompt.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each shape, which take turns.")] = 3,
    drafter: Drafter = "prompt_lookup",
    device: Device = "",
    codegen: Codegen = None,
) -> None:
    """Measure accepted tokens against the cost of a step for several tree shapes, and say which one pays."""
    from treewy_inductor.command_options import compile_options, model_path, parse_widths, text_of

    widths = [parse_widths(shape) for shape in shapes.split()]
    if not widths:
        raise typer.BadParameter("--shapes names no tree: write widths such as '1,1,1 2,2,2'")
    given = text_of(prompt, prompt_file)
    where = model_path(model)

    from rich.console import Console

    from treewy_inductor.command_demo import PROMPT
    from treewy_inductor.models.load_model import load_model, prompt_tokens
    from treewy_inductor.shape_comparison import compare_shapes, report

    loaded, tokenizer = load_model(where, device or None)
    own = drafter if drafter in ("mtp", "prompt_lookup") else load_model(drafter, device or None)[0]
    options = compile_options(codegen, loaded.device.type)
    console = Console(highlight=False)
    with console.status("measuring ..."):
        found = compare_shapes(
            loaded, [prompt_tokens(tokenizer, given or PROMPT)] * batch, widths, new_tokens, own, options, rounds
        )
    report(console, found, loaded, drafter)
