"""The lines of the whole step's table in docs/results.md, from step.json."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
LAYERS = {"outlined": "outlined", "inlined": "each compiled"}


def step_lines(data: Row) -> list[list[str]]:
    """Return a line a model and batch, then one for the same with layers compiled the other way where that was timed."""
    lines = []
    for row in data["rows"]:
        named = [row["model"], str(row["batch"])]
        own = LAYERS["outlined" if row.get("outlined") else "inlined"]
        if "step_us" not in row:
            lines.append([*named, own, *["·"] * 4, _seconds(row, "compile_s"), row["commit"]])
            continue
        token = f"{row['decode_us']:,.0f} ({row['decode_p10']:,.0f}-{row['decode_p90']:,.0f})" if "decode_us" in row else "·"
        step = f"{row['step_us']:,.0f} ({row['step_p10']:,.0f}-{row['step_p90']:,.0f})"
        ratio = row.get("step_over_decode")
        alone = row.get("step_ungraphed_us", row.get("ungraphed_us"))
        timed = [token, step, "?" if ratio is None else f"{ratio:.2f}", "·" if alone is None else f"{alone:,.0f}"]
        lines.append([*named, own, *timed, _seconds(row, "compile_s"), row["commit"]])
        for kind, told in LAYERS.items():
            if told != own and f"{kind}_us" in row:
                other = f"{ratio * row[f'{kind}_us'] / row['step_us']:.2f}" if ratio else "?"
                timed = [token, f"{row[f'{kind}_us']:,.0f}", other, "·", _seconds(row, f"{kind}_compile_s")]
                lines.append([*named, told, *timed, row["commit"]])
    return lines


def _seconds(row: Row, name: str) -> str:
    return f"{row[name]:.0f}" if name in row else "·"
