"""``treewy explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treewy_inductor.command_options import SMALL_MODEL, Widths, parse_widths, told_in_one_sentence


def explain(
    model: Annotated[
        str,
        typer.Option(
            help="A checkpoint's folder or name, or a folder with a config.json alone.",
            show_default="the small model of this package",
        ),
    ] = str(SMALL_MODEL),
    widths: Widths = "3,3",
    html: Annotated[Path | None, typer.Option(help="Where to write the report as an HTML page.")] = None,
    with_weights: Annotated[bool, typer.Option(help="Load the weights; recognition does not need them.")] = False,
) -> None:
    """Say which recurrences of a model are proven and rewritten for trees, and why others are refused."""
    import json

    import torch

    from treewy_inductor.explanation import explain as explain_model
    from treewy_inductor.models.build_model import build_model
    from treewy_inductor.models.tree_cache import TreeCache
    from treewy_inductor.tree import DraftTree

    tree = DraftTree.from_widths(parse_widths(widths))
    with told_in_one_sentence():
        loaded = build_model(model, with_weights=with_weights)
        cache = TreeCache(loaded.config, 1, 2 * len(tree), len(tree), dtype=loaded.dtype)
    cache.set_tree(tree)
    explanation = explain_model(loaded, **cache.inputs(torch.zeros(1, len(tree), dtype=torch.long)))
    typer.echo(explanation.text())
    if html is not None:
        explanation.save(str(html))
        typer.echo(f"Written to {html}.")
    typer.echo(json.dumps(explanation.to_dict()))
    if explanation.refusals:
        raise typer.Exit(1)
