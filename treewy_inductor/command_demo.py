"""``treewy demo``: the whole idea on the small model in the package, with its proof."""

from __future__ import annotations

from typing import Annotated

import typer

from treewy_inductor.command_options import Codegen, Device, Drafter, Model, Widths, told_in_one_sentence

PROMPT = '''def read_lines(path, encoding="utf-8"):
    """Return the lines of the file at path.

    Blank lines and comments are left out.
    """
    lines = []
    with open(path, encoding=encoding) as file:
        for line in file:
'''


@told_in_one_sentence()
def demo(
    model: Model = "",
    prompt: Annotated[str, typer.Option(help="Text to go on from.", show_default="the head of a Python function")] = PROMPT,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 120,
    widths: Widths = "3,3,3",
    drafter: Drafter = "mtp",
    device: Device = "",
    codegen: Codegen = None,
) -> None:
    """Generate text with draft trees on an unmodified model, and check it against the model alone."""
    from treewy_inductor.command_options import compile_options, model_path, parse_widths

    shape = parse_widths(widths)
    where = model_path(model)

    from rich.console import Console

    from treewy_inductor.demonstration import demonstrate, report
    from treewy_inductor.models.load_model import load_model

    console = Console(highlight=False)
    loaded, tokenizer = load_model(where, device or None)
    options = compile_options(codegen, loaded.device.type)
    own = drafter if drafter in ("mtp", "prompt_lookup") else load_model(drafter, device or None)[0]
    result = demonstrate(console, loaded, tokenizer, prompt, new_tokens, shape, own, options)
    report(console, result)
    if not result.is_right:
        raise typer.Exit(1)
