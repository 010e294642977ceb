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
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 128,
    widths: Widths = "3,3,3",
    node_budget: Annotated[
        int,
        typer.Option(min=0, show_default=False, help="Nodes of a tree, spent where drafts are likeliest, in place of widths."),
    ] = 0,
    drafter: Drafter = "prompt_lookup",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Probability that is kept; 1 keeps all tokens.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 keeps all tokens.")] = 0,
    seed: Annotated[int, typer.Option(help="A seed gives the same text again.")] = 0,
    device: Device = "",
    dtype: Annotated[str, typer.Option(help="Such as bfloat16.")] = "",
    codegen: Codegen = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line alone.")] = False,
) -> None:
    """Generate text from a prompt by verifying draft trees."""
    from treewy_inductor.command_options import compile_options, model_path, parse_widths, text_of

    if not prompt and prompt_file is None:
        raise typer.BadParameter("give a prompt, by --prompt or by --prompt-file")
    text = text_of(prompt, prompt_file)
    shape = parse_widths(widths)
    where = model_path(model)

    import json

    from rich.console import Console

    from treewy_inductor.generation import generate as generate_text
    from treewy_inductor.generation_statistics import GenerationStatistics
    from treewy_inductor.models.load_model import load_model, prompt_tokens
    from treewy_inductor.token_painter import TokenPainter, show_legend

    loaded, tokenizer = load_model(where, device or None, dtype or None)
    ids = prompt_tokens(tokenizer, text)
    if not ids:
        raise typer.BadParameter(
            f"the tokenizer of {where} makes no token of {text[:40]!r}: give a text, or a folder with its tokenizer"
        )
    console, notes = Console(quiet=as_json), Console(stderr=True)
    painter = TokenPainter(console, lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))
    statistics = GenerationStatistics()
    warpers: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    sampling = warpers if temperature > 0 else {}
    show_legend(console)
    with notes.status("compiling the model's step ...") as status:

        def on_tokens(row: int, tokens: list[int], accepted: int) -> None:
            # What tells of compiling would be in the way of an unfinished line.
            status.stop()
            if statistics.forwards == 0:
                painter.prompt(ids)
            painter(row, tokens, accepted)

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
            on_tokens=on_tokens,
            compile_options=compile_options(codegen, loaded.device.type),
            **sampling,
        )
    painter.end()
    if as_json:
        new = tokenizer.decode(out[0, len(ids) :].tolist(), skip_special_tokens=True)
        print(json.dumps({"text": new} | json.loads(statistics.to_json())))
        return
    shares = ", ".join(f"{share:.0%}" for share in statistics.acceptance_by_depth)
    drafting = statistics.draft_seconds / max(1, statistics.forwards)
    notes.print(
        f"\n{statistics.tokens} tokens in {statistics.steps} steps: {statistics.tokens_per_step:.2f} a step; accepted by depth "
        f"{shares or 'none'}; {statistics.prefill_seconds + statistics.first_step_seconds:.1f} s until the first tokens, with "
        f"compiling, then {1e3 * statistics.later_step_seconds:.1f} ms a step, {1e3 * drafting:.1f} of them drafting",
        highlight=False,
    )
