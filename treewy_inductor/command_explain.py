"""``treewy explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain(
    model: Annotated[str, typer.Option(help="A checkpoint's folder or name, or a folder with a config.json alone.")],
    widths: Annotated[str, typer.Option(help="Children of every node, level by level.")] = "3,3",
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

    try:
        tree = DraftTree.from_widths([int(width) for width in widths.split(",")])
    except ValueError as error:
        raise typer.BadParameter(f"widths is {widths!r}: {error}") from None
    try:
        loaded = build_model(model, with_weights=with_weights)
        cache = TreeCache(loaded.config, 1, 2 * len(tree), len(tree), dtype=loaded.dtype)
    except (OSError, ValueError, NotImplementedError) as error:
        raise typer.BadParameter(f"model is {model!r}: {error}") from None
    cache.set_tree(tree)
    explanation = explain_model(loaded, **cache.inputs(torch.zeros(1, len(tree), dtype=torch.long)))
    typer.echo(explanation.text())
    if html is not None:
        explanation.save(str(html))
        typer.echo(f"Written to {html}.")
    typer.echo(json.dumps(explanation.to_dict()))
    if explanation.refusals:
        raise typer.Exit(1)
