"""What bench.step prints and keeps of a case."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import machine_line, measured_commit
from bench.step_process import StepProcess
from bench.turns import QUANTILES
from treewy_inductor.tree import DraftTree

HEAD = "model batch  decode us (p10-p90)  step us (p10-p90)  ratio (by turn) | no graph us  compile s"
NODES = len(DraftTree.from_widths((3, 3, 3)))
WORST_ERROR = 1.1


def is_right(found: dict[str, Any]) -> bool:
    """Whether a side's logits were checked and near enough, or it has none to check."""
    return bool(found.get("err", 0) <= WORST_ERROR * found.get("eager_err", 1))


def row_of(sides: Sequence[StepProcess], still: float) -> dict[str, Any]:
    """Return a row from what the processes of a case found: stock, ours, and ours in other ways.

    Args:
        still: the largest drift of a side at which its median may stand in a ratio.
    """
    decode, step = sides[0].found, sides[1].found
    job = sides[1].job
    row: dict[str, Any] = {"model": job.size, "batch": job.batch, "nodes": NODES, "commit": measured_commit()}
    errors = [f"{side.job.kind}: {side.error}" for side in sides if side.error]
    if errors:
        row["error"] = "; ".join(errors)
    for name in ("compile_s", "tree_compile_s", "compiled_beside", "err", "eager_err", "random_trees"):
        if name in step:
            row[name] = step[name]
    if "compile_s" in decode:
        row |= {"decode_compile_s": decode["compile_s"], "decode_compiled_beside": decode["compiled_beside"]}
    for name, found in (("step", step), ("decode", decode)):
        row |= {f"{name}_{each}": found[each] for each in (*QUANTILES, "drift", "turns", "ungraphed_us") if each in found}
        row |= {f"{name}_graphs": found["graphs"]} if "graphs" in found else {}
    row |= {each: step[each] for each in ("recompiles", "recaptures") if each in step}
    row |= _ratio(row, still)
    if "step_ungraphed_us" in row:
        row["ungraphed_over_step"] = row["step_ungraphed_us"] / row["step_us"]
    for side in sides[2:]:
        row |= {f"{side.job.kind}_{name}": value for name, value in side.found.items() if isinstance(value, int | float)}
        if "us" in side.found and "us" in step:
            row[f"{side.job.kind}_over_step"] = side.found["us"] / step["us"]
    return row


def _ratio(row: dict[str, Any], still: float) -> dict[str, Any]:
    if "step_us" not in row or "decode_us" not in row:
        return {}
    each = [mine / theirs for mine, theirs in zip(row["step_turns"], row["decode_turns"], strict=True)]
    told: dict[str, Any] = {
        "step_over_decode": row["step_us"] / row["decode_us"],
        "step_over_decode_turns": [min(each), max(each)],
    }
    drifts = {"the step's": row["step_drift"], "the baseline's": row["decode_drift"]}
    moved = [f"{name} quartiles moved by {drift:.0%} of its median" for name, drift in drifts.items() if drift > still]
    if moved:
        told |= {"step_over_decode": None, "step_over_decode_unknown": " and ".join(moved) + " from turn to turn"}
    return told


def tabulate(row: dict[str, Any]) -> str:
    """Return one line of the report."""
    head = f"{row['model']:>5} {row['batch']:>5}"
    if "error" in row:
        return f"{head}  {row['error']}"
    if "step_us" not in row:
        return f"{head}  wrong: error {row['err']:.1e}, eager bf16 {row['eager_err']:.1e}"

    def shown(name: str, width: int) -> str:
        value = row.get(name)
        return f"{'?':>{width}}" if value is None else f"{value:{width}.{2 if width < 7 else 0}f}"

    def spread(name: str) -> str:
        return f"({row[f'{name}_p10']:.0f}-{row[f'{name}_p90']:.0f})" if f"{name}_p10" in row else ""

    line = f"{head} {shown('decode_us', 8)} {spread('decode')} {shown('step_us', 8)} {spread('step')}"
    low, high = row.get("step_over_decode_turns", (float("nan"), float("nan")))
    line += f" {shown('step_over_decode', 6)} ({low:.2f}-{high:.2f}) | {shown('step_ungraphed_us', 9)}   {row['compile_s']:.1f}"
    others = [f"{name.removesuffix('_over_step')} {row[name]:.3f}" for name in row if name.endswith("_over_step")]
    return line + (f"  over the step: {', '.join(others)}" if others else "")


def keep(rows: Sequence[dict[str, Any]], out: Path) -> dict[str, Any]:
    """Write step.json of the rows so far and return what it holds."""
    found: dict[str, Any] = {"machine": machine_line("bf16"), "date": time.strftime("%Y-%m-%d"), "rows": rows}
    for name in ("recompiles", "recaptures"):
        trees = (row.get("random_trees", {}).get(name, 0) for row in rows)
        found[name] = sum(trees) + sum(row.get(name, 0) for row in rows)
    (out / "step.json").write_text(json.dumps(found, indent=1) + "\n")
    return found
