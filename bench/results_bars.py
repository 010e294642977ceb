"""What was asked of the commit policies beside what was found: the last table of docs/results.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.capacity_measure import POLICIES, SERVED_SHAPES, nodes_of, step_times
from treewy_inductor.layer_shapes import default_flush_every

Row = dict[str, Any]
TREES = ("1,1,1", "3,3,3")
OURS = POLICIES[1:]


def bar_lines(capacity: Row, policies: Row, steps: Row) -> list[list[str]]:
    """Return a line a bar: what was asked, what each policy of ours reaches, and whether that is enough."""
    lines = []
    for tree, least in zip(TREES, (2.4, 10), strict=True):
        found = [capacity["memory_ratios"][tree][policy]["states_and_stand_ins"] for policy in OURS]
        cells = [f"{each:.1f}" for each in found]
        lines.append([f"memory for states, ({tree}), lower by", f"at least {least}", *cells, _verdict(min(found) >= least)])
    for name, rows in (("all that fit", capacity["rows"]), ("no slower", capacity["paced_rows"])):
        for label, key, is_lower_better, asked in (
            ("sequences", "admitted", False, "more"),
            ("throughput", "throughput", False, "higher"),
            ("p99 time to the first token, lower by", "p99_ttft_ms", True, "lower"),
            ("speed per token", "tpot_ms", True, "at least 1.0"),
        ):
            cells, is_met = [], []
            for policy in OURS:
                found = [list(_gains(rows, tree, policy, key, is_lower_better)) for tree in TREES]
                means = [float(np.exp(np.mean(np.log(each)))) for each in found]
                good = sum(gain >= 1 for each in found for gain in each)
                points = sum(map(len, found))
                cells.append(f"{means[0]:.2f} and {means[1]:.2f}; {good} of {points}")
                is_met.append(min(means) >= 1)
            lines.append([f"memory-bound, {name}: {label}", asked, *cells, _verdict(*is_met)])
    slowest = [max(_headroom_steps(capacity["rows"], policy)) for policy in OURS]
    cells = [f"{each:.3f}" for each in slowest]
    lines.append(["slowest headroom step over `store_all`'s", "at most 1.02", *cells, _verdict(*(x <= 1.02 for x in slowest))])
    for label, times in (("layer", layers_deferred(policies["rows"])), ("whole step", steps_deferred(steps))):
        slow = max(times)
        verdict = _verdict(slow <= 1.02)
        lines.append([f"slowest {label} of `replay` over `reconstruct`'s", "at most 1.02", "·", f"{slow:.3f}", verdict])
    return lines


def _verdict(*is_met: bool) -> str:
    if len(set(is_met)) == 1:
        return "met" if is_met[0] else "missed"
    return f"met by `{OURS[is_met.index(True)]}`"


def _gains(rows: Sequence[Row], tree: str, policy: str, key: str, is_lower_better: bool) -> Iterator[float]:
    """Yield how many times better than store_all's a figure is at each memory-bound point of ``tree``."""
    base = {point(row): row[key] for row in rows if row["policy"] == "store_all"}
    for row in rows:
        if (row["tree"], row["policy"], row["bound"]) == (tree, policy, "memory"):
            ratio = row[key] / base[point(row)]
            yield 1 / ratio if is_lower_better else ratio


def _headroom_steps(rows: Sequence[Row], policy: str) -> Iterator[float]:
    """Yield the time of a step over store_all's at each headroom point."""
    base = {point(row): row["step_ms"] for row in rows if row["policy"] == "store_all"}
    for row in rows:
        if (row["policy"], row["bound"]) == (policy, "headroom"):
            yield row["step_ms"] / base[point(row)]


def layers_deferred(rows: Sequence[Row]) -> list[float]:
    """Return the time of a layer under replay, as it is by default, over reconstruct's at each point where tokens wait."""
    written = {(row["model"], row["tree"], row["batch"]): row["us_a_layer"] for row in rows if row["policy"] == "reconstruct"}
    heads = {model.name: model.linear.value_heads for model in SERVED_SHAPES.values()}
    return [
        row["us_a_layer"] / written[row["model"], row["tree"], row["batch"]]
        for row in rows
        if row["policy"] == "replay"
        and row["flush_every"] == default_flush_every(nodes_of(row["tree"].strip("()")), row["batch"] * heads[row["model"]])
    ]


def steps_deferred(steps: Row) -> list[float]:
    """Return the time of a whole step under replay, as it is by default, over reconstruct's where tokens wait."""
    model = SERVED_SHAPES["35b"]
    found = []
    for widths, rows in steps["trees"].items():
        times = {policy: dict(zip(*step_times(model, rows, policy), strict=True)) for policy in OURS}
        for batch, seconds in times["replay"].items():
            if default_flush_every(nodes_of(widths), batch * model.linear.value_heads) > 1:
                found.append(seconds / times["reconstruct"][batch])
    return found


def point(row: Row) -> tuple[Any, ...]:
    """Return what says which point of the grid a row belongs to."""
    return row["tree"], row["trace"], row["budget"], row["concurrency"]
