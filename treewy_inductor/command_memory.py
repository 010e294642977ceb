"""``treewy memory``: what a cache holds per sequence under each commit policy."""

from __future__ import annotations

from typing import Annotated

import typer


def memory(
    model: Annotated[str, typer.Option(help="A model of the table of shapes, or all.")] = "all",
    batch: Annotated[int, typer.Option(help="Sequences.", min=1)] = 64,
    widths: Annotated[str, typer.Option(help="Children of every node, level by level; 1,1,1 is a chain.")] = "3,3,3",
    max_length: Annotated[int, typer.Option(help="Tokens that a sequence can hold.", min=1)] = 4096,
    dtype: Annotated[str, typer.Option(help="Of keys, values and convolution: bfloat16 or float32.")] = "bfloat16",
    flush_every: Annotated[int | None, typer.Option(help="Tokens that the trunk of replay holds.", min=1)] = None,
) -> None:
    """Print the bytes of a TreeCache, buffer by buffer for one model, in one line for each of all models.

    The commit policies stand side by side, for a state in bfloat16 and in float32. Nothing is allocated.
    """
    from treewy_inductor.memory import ITEM_BYTES, nodes_of_widths
    from treewy_inductor.memory_report import all_models, one_model, print_report
    from treewy_inductor.model_shapes import model_shape

    try:
        levels = tuple(int(width) for width in widths.split(","))
    except ValueError:
        raise typer.BadParameter(f"--widths is {widths!r}, expected numbers such as 3,3,3") from None
    try:
        nodes_of_widths(levels)
    except ValueError as error:
        raise typer.BadParameter(f"--widths: {error}") from None
    if dtype not in ITEM_BYTES:
        raise typer.BadParameter(f"--dtype is {dtype!r}, expected bfloat16, float16 or float32")
    if model == "all":
        print_report(all_models(batch=batch, widths=levels, max_length=max_length, dtype=dtype, flush_every=flush_every))
        return
    try:
        shape = model_shape(model)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for state_dtype in ("bfloat16", "float32"):
        print_report(
            one_model(
                shape,
                batch=batch,
                widths=levels,
                max_length=max_length,
                dtype=dtype,
                state_dtype=state_dtype,
                flush_every=flush_every,
            )
        )
