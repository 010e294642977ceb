"""``treewy generate``: text from a model, its accepted drafts in colour."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from treewy_inductor.command_options import Codegen, Device, Drafter, Model, Widths, told_in_one_sentence


@told_in_one_sentence()
def generate(
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    prompt_file: Annotated[Path | None, typer.Option(help="File with the text to go on from.")] = None,
    model: Model = "",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    widths: Widths = "3,3,3",
    node_budget: Annotated[int, typer.Option(help="Nodes of a tree, in place of widths.")] = 0,
    drafter: Drafter = "prompt_lookup",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 keeps all tokens.")] = 0,
    seed: Annotated[int, typer.Option(help="A seed gives the same text again.")] = 0,
    device: Device = "",
    dtype: Annotated[str, typer.Option(help="Such as bfloat16.")] = "",
    codegen: Codegen = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line alone.")] = False,
) -> None:
    """Generate text from a prompt by verifying draft trees."""
    from treewy_inductor.command_options import compile_options, model_path, parse_widths

    if bool(prompt) == (prompt_file is not None):
        raise typer.BadParameter("give a prompt, by --prompt or by --prompt-file")
    shape = parse_widths(widths)
    where = model_path(model)

    import json

    from rich.console import Console

    from treewy_inductor.generation import generate as generate_text
    from treewy_inductor.generation_statistics import GenerationStatistics
    from treewy_inductor.models.load_model import load_model, prompt_tokens
    from treewy_inductor.token_painter import TokenPainter, legend

    loaded, tokenizer = load_model(where, device or None, dtype or None)
    text = prompt_file.read_text() if prompt_file is not None else prompt
    ids = prompt_tokens(tokenizer, text)
    if not ids:
        raise typer.BadParameter("the prompt has no tokens: give some text")
    console = Console(quiet=as_json)
    painter = TokenPainter(console, lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))
    statistics = GenerationStatistics()
    warpers: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    sampling = warpers if temperature > 0 else {}
    console.print(legend())
    painter.prompt(ids)
    out = generate_text(
        loaded,
        [ids],
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        draft_tree_widths=None if node_budget else shape,
        draft_node_budget=node_budget or None,
        drafter=drafter if drafter in ("mtp", "prompt_lookup") else load_model(drafter, device or None)[0],
        seed=seed,
        statistics=statistics,
        on_tokens=painter,
        compile_options=compile_options(codegen, loaded.device.type),
        **sampling,
    )
    painter.end()
    if as_json:
        new = tokenizer.decode(out[0, len(ids) :].tolist(), skip_special_tokens=True)
        print(json.dumps({"text": new} | json.loads(statistics.to_json())))
        return
    shares = ", ".join(f"{share:.0%}" for share in statistics.acceptance_by_depth)
    Console(stderr=True).print(
        f"\n{statistics.tokens} tokens in {statistics.steps} steps: {statistics.tokens_per_step:.2f} a step; accepted by depth "
        f"{shares or 'none'}; drafting {statistics.draft_seconds:.1f} s, verifying {statistics.verify_seconds:.1f} s, with "
        "compiling",
        highlight=False,
    )
