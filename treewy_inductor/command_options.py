"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help="Folder or hub name of the model; by default the small one in the package.")]
Widths = Annotated[str, typer.Option(help="Children of a node per level, such as 3,3,3.")]
Drafter = Annotated[str, typer.Option(help="mtp, prompt_lookup, or folder or hub name of a smaller model.")]
Device = Annotated[str, typer.Option(help="Such as cpu or cuda; by default a GPU if there is one.")]
Codegen = Annotated[
    bool | None,
    typer.Option(help="Generate code for the graph, or run it op by op. By default code is generated on a GPU alone."),
]

SMALL_MODEL = Path(__file__).parent / "small_model"


@contextlib.contextmanager
def told_in_one_sentence() -> Iterator[None]:
    """Turn what the library says of a user's input, or of a model that it cannot take, into a command's error.

    Raises:
        typer.BadParameter: with the same sentence.
    """
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from error
    except RuntimeError as error:
        from treewy_inductor.errors import UnprovenRecurrence

        # What a backend raises comes wrapped in a report of the compiler.
        refused = getattr(error, "inner_exception", error)
        if not isinstance(refused, UnprovenRecurrence):
            raise
        raise typer.BadParameter(str(refused)) from error


def parse_widths(widths: str) -> tuple[int, ...]:
    """Return ``"3,3,3"`` as (3, 3, 3)."""
    from treewy_inductor.tree import DraftTree

    try:
        shape = tuple(int(width) for width in widths.split(",") if width.strip())
    except ValueError:
        raise typer.BadParameter(f"{widths!r} is no list of widths: write numbers such as 3,3,3") from None
    with told_in_one_sentence():
        DraftTree.from_widths(shape)
    return shape


def text_of(prompt: str, prompt_file: Path | None) -> str:
    """Return the prompt, or what the file holds.

    Raises:
        typer.BadParameter: if there are both, or the file is no text.
    """
    if prompt_file is None:
        return prompt
    if prompt:
        raise typer.BadParameter("give a prompt either by --prompt or by --prompt-file")
    try:
        return prompt_file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{prompt_file} is no text in UTF-8: {error.reason} at byte {error.start}") from error


def model_path(model: str) -> str:
    """Return where the model is.

    Raises:
        typer.BadParameter: if the small model was asked for and this installation lacks it.
    """
    if model:
        return model
    if not (SMALL_MODEL / "model.safetensors").exists():
        raise typer.BadParameter(f"there is no small model in {SMALL_MODEL}: pass --model with a folder or hub name")
    return str(SMALL_MODEL)


def compile_options(codegen: bool | None, device: str) -> dict[str, object]:
    """Return the options of torch.compile: on the CPU, where compiling C++ takes minutes, the graph runs op by op."""
    generates = device != "cpu" if codegen is None else codegen
    return {} if generates else {"options": {"treewy.codegen": False}}
