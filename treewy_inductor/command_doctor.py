"""``treewy doctor``."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    json_only: Annotated[bool, typer.Option("--json", help="Print the JSON line alone.")] = False,
) -> None:
    """Look at versions, devices and the private parts of torch, compile a tree, and say what to do about what is missing."""
    import json
    import sys

    from treewy_inductor.doctor import WRONG, examine, report, to_dict, worst

    checks = examine()
    if not json_only:
        typer.echo(report(checks, color=sys.stdout.isatty()))
    typer.echo(json.dumps(to_dict(checks)))
    if worst(checks) == WRONG:
        raise typer.Exit(1)
