"""Draw what bench/results holds of the commit policies into docs/pictures: ``python -m bench.draw_results``.

Memory by tree (memory.json), time of the recurrent layers by batch (policies.json), capacity (capacity.json); a file that is
not there gives no picture.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
COLOURS = {"store_all": "#b4451f", "reconstruct": "#1f6fb4", "replay": "#3a8f5c"}


def finish(axes: Axes, title: str, x: str, y: str) -> None:
    """Name the axes and take away what says nothing."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def draw_memory(data: dict[str, Any]) -> None:
    """Draw MiB of states a sequence over the nodes of the tree, a line a policy."""
    _, panes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axes, state_dtype in zip(panes, ("bfloat16", "float32"), strict=True):
        for policy, colour in COLOURS.items():
            rows = [r for r in data["rows"] if (r["policy"], r["state_dtype"]) == (policy, state_dtype)]
            rows.sort(key=lambda row: row["nodes"])
            axes.plot([r["nodes"] for r in rows], [r["state_mib"] for r in rows], "o-", color=colour, label=policy)
        axes.set_yscale("log")
        finish(axes, f"{data['model']}, state in {state_dtype}", "nodes of the tree", "MiB a sequence for states")


def draw_policies(data: dict[str, Any]) -> None:
    """Draw microseconds a layer for verify and commit over the batch, a pane a shape and tree, relative to store_all."""
    keys = list(dict.fromkeys((row["model"], row["tree"]) for row in data["rows"]))
    _, panes = plt.subplots(1, len(keys), figsize=(3.2 * len(keys), 3.2), squeeze=False)
    for axes, (model, tree) in zip(panes[0], keys, strict=True):
        rows = [row for row in data["rows"] if (row["model"], row["tree"]) == (model, tree)]
        base = {row["batch"]: row["us_a_layer"] for row in rows if row["policy"] == "store_all"}
        for policy, slots in dict.fromkeys((row["policy"], row["flush_every"]) for row in rows):
            own = [row for row in rows if (row["policy"], row["flush_every"]) == (policy, slots) and row["batch"] in base]
            style = {None: "o-", 8: "v:", 16: "s--", 32: "^-."}[slots]
            label = policy if slots is None else f"{policy}, {slots} tokens"
            times = [row["us_a_layer"] / base[row["batch"]] for row in own]
            axes.plot([row["batch"] for row in own], times, style, color=COLOURS[policy], label=label, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(base), list(base))
        axes.set_ylim(bottom=0)
        finish(axes, f"{model}\n{tree}", "batch", "time over store_all's")


def draw_capacity(data: dict[str, Any]) -> None:
    """Draw tokens a second and p99 time to the first token over the concurrency at the tightest budget, chain, Poisson."""
    rows = [row for row in data["rows"] if (row["tree"], row["trace"]) == ("1,1,1", "poisson")]
    budget = min(row["budget"] for row in rows)
    _, panes = plt.subplots(1, 2, figsize=(9, 3.2))
    for axes, name, unit in zip(panes, ("throughput", "p99_ttft_ms"), ("tokens/s", "p99 ms to the first token"), strict=True):
        for policy, colour in COLOURS.items():
            own = [row for row in rows if (row["policy"], row["budget"]) == (policy, budget)]
            users = [row["concurrency"] for row in own]
            # Where replay runs as reconstruct does, its dashes leave the other line to be seen.
            style = "s--" if policy == "replay" else "o-"
            axes.plot(users, [row[name] for row in own], style, color=colour, label=policy, markersize=4)
            axes.set_xscale("log", base=2)
            axes.set_xticks(users, users)
        axes.set_yscale("log")
        finish(axes, f"Qwen3.5-35B-A3B, chain, budget {budget}", "users", unit)


DRAWINGS: dict[str, Callable[[dict[str, Any]], None]] = {
    "memory": draw_memory,
    "policies": draw_policies,
    "capacity": draw_capacity,
}


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        source = RESULTS / f"{name}.json"
        if not source.exists():
            print(f"{source.name} is not there: run bench/{name}.py first")
            continue
        draw(json.loads(source.read_text()))
        plt.tight_layout()
        plt.savefig(PICTURES / f"{name}.png", dpi=130)
        plt.close("all")
        print(f"docs/pictures/{name}.png")


if __name__ == "__main__":
    main()
