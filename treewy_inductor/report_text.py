"""An explanation as text for a terminal."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table
from rich.text import Text

from treewy_inductor.errors import grouped, layers_of
from treewy_inductor.findings import Explanation, FoundRecurrence, RefusedRegion


def render(explanation: Explanation, *, width: int = 120, color: bool = False) -> str:
    """Return the report, at most ``width`` columns wide."""
    console = Console(file=io.StringIO(), width=width, force_terminal=color, color_system="standard" if color else None)
    console.print(Text(f"{explanation.model}: {explanation.verdict()}", style="bold"))
    console.print(
        f"{explanation.graphs} graph, {explanation.nodes_before} nodes before and {explanation.nodes_after} after, "
        f"{explanation.convolutions} short convolutions, {explanation.compile_seconds:.1f} s, of these "
        f"{explanation.rewrite_seconds:.1f} s to prove and rewrite",
        highlight=False,
    )
    if explanation.recurrences:
        console.print(_table(explanation))
    for group in _equal_roles(explanation.recurrences):
        first = group[0]
        layers = ", ".join(str(recurrence.layer) for recurrence in group)
        console.print(f"layer {layers}: {first.rule}", highlight=False)
        for role, node in first.roles.items():
            console.print(f"    {role:<10} {node}", highlight=False)
    for refused in grouped(explanation.refusals):
        console.print(_refusal(refused))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def _table(explanation: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", "where"):
        table.add_column(name, overflow="fold")
    for name in ("error", "runner-up", "nodes", "bytes/node", "a state", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    for found in explanation.recurrences:
        table.add_row(
            str(found.layer),
            f"{found.module} {short_source(found.source)}".strip(),
            f"{found.error:.0e}" if found.proven_by == found.layer else f"as {found.proven_by}",
            f"{found.runner_up:.0e}",
            f"{found.nodes_before} > {found.nodes_after}",
            f"{found.bytes_kept:,}",
            f"{found.bytes_of_state:,}",
            f"{found.bytes_of_state / found.bytes_kept:.0f}x",
        )
    return table


def _refusal(group: list[RefusedRegion]) -> Text:
    refusal, text = group[0], Text()
    text.append(f"refused, {layers_of(group)}\n", style="bold red")
    if refusal.source:
        text.append(f"    {refusal.source}\n", style="cyan")
    if refusal.code:
        text.append(f"        {refusal.code}\n")
    for caller in refusal.callers:
        text.append(f"    called at {caller}\n")
    text.append(f"    {refusal.reason}\n    (node {refusal.node}, {refusal.op})")
    return text


def _equal_roles(found: tuple[FoundRecurrence, ...]) -> list[list[FoundRecurrence]]:
    """Group the layers of one proof: their roles differ by node names alone."""
    groups: dict[int, list[FoundRecurrence]] = {}
    for recurrence in found:
        groups.setdefault(recurrence.proven_by, []).append(recurrence)
    return list(groups.values())


def short_source(source: str) -> str:
    """Return ``file:line`` without its folders."""
    return source.replace("\\", "/").rsplit("/", 1)[-1]
