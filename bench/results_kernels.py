"""The lines of the kernels' tables in docs/results.md, from what bench.kernels, time_over_nodes and sanitize measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
WIDTHS = {"chain4": "(1,1,1)", "w222": "(2,2,2)", "w333": "(3,3,3)"}
SIZES = (4, 16, 40, 64, 128, 256)


def kernel_lines(data: Row) -> list[list[str]]:
    """Return a line a tree and batch; a kernel that was wrong has no time."""
    lines = []
    for row in data["rows"]:
        named = [WIDTHS.get(row["tree"], row["tree"]), str(row["batch"])]
        if not row["right"]:
            lines.append([*named, "wrong", *["·"] * 7, _power(row["u_err"]), "·", _power(row["o_err"])])
            continue
        verify = f"{row['verify_us']:.1f} ({row['verify_p10']:.1f}-{row['verify_p90']:.1f})"
        line = [*named, f"{row['read_us']:.1f}", verify, f"{row['verify_over_read']:.2f}", f"{row['copy_us']:.1f}"]
        line += _pair(row, "commit_us", "commit_over_readwrite") + _pair(row, "fused_us", "fused_over_readwrite")
        lines.append([*line, *(_power(row[name]) for name in ("u_err", "state_err", "o_err"))])
    return lines


def peer_lines(data: Row, names: Sequence[str]) -> list[list[str]]:
    """Return a line a tree and batch: microseconds of each peer that was there, could run it and was right."""
    lines = []
    for row in data["rows"]:
        if not row["right"]:
            continue
        line = [WIDTHS.get(row["tree"], row["tree"]), str(row["batch"]), f"{row['verify_us']:.1f}"]
        for name in names:
            peer = row["peers"].get(name)
            line.append("·" if peer is None else f"{peer['us']:,.1f}" if peer["right"] else "wrong")
        best = row["snapshots_by"]
        lines.append([*line, "·" if best is None else f"{row['snapshots_over_verify']:.1f} ({best})"])
    return lines


def solve_lines(data: Row) -> list[list[str]]:
    """Return a line a size and tree at the largest batch."""
    batch = max(row["batch"] for row in data["rows"])
    lines = []
    for row in data["rows"]:
        if row["batch"] == batch and row["nodes"] in SIZES:
            named = [str(row["nodes"]), row["tree"], str(batch)]
            us = (
                [f"{row[f'{name}_us']:,.1f}" for name in ("verify", "roots", "solve", "library")]
                if row["right"]
                else ["wrong"] * 4
            )
            lines.append([*named, *us])
    return lines


def check_lines(data: Row) -> list[list[str]]:
    """Return a line a kernel and kinds of numbers: shapes at which the table's tiles were checked, and the largest errors."""
    checked = [row for row in data["rows"] if "trunk" in row]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in checked:
        groups.setdefault(tuple(row[name] for name in ("kernel", "dtype", "state_dtype")), []).append(row)
    lines = []
    for named, rows in groups.items():
        right = [row for row in rows if row["is_right"]]
        errors = [(row["errors"][1], row.get("state_err", row["errors"][-1])) for row in right]
        worst = [_power(max(column)) for column in zip(*errors, strict=True)] or ["·", "·"]
        lines.append([*named, f"{len(right)} of {len(rows)}", *worst])
    return lines


def sanitizer_lines(data: Row) -> list[list[str]]:
    """Return a line a tool; a process that ended before its tool could count has found nobody knows what."""
    tools = [(name, row) for name, row in data.items() if isinstance(row, dict)]
    unknown = {name: f", {row['silent']} processes said nothing" if row["silent"] else "" for name, row in tools}
    return [[name, f"{row['passed']} of {row['tests']}", f"{row['found']}{unknown[name]}"] for name, row in tools]


def _pair(row: Row, *names: str) -> list[str]:
    """Return microseconds and their ratio, dots where they were not measured."""
    return [f"{row[names[0]]:.1f}", f"{row[names[1]]:.2f}"] if names[0] in row else ["·", "·"]


def _power(error: float) -> str:
    return f"{error:.0e}"
