"""Draw what bench/results holds into docs/pictures: ``python -m bench.draw_results``.

Of the commit policies: memory by tree (memory.json), time of the recurrent layers by batch (policies.json), capacity
(capacity.json). Of the kernels: ours beside other projects' (kernels.json), the solve by nodes (time_over_nodes.json). A file
that is not there gives no picture.
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

from bench.results_kernels import WIDTHS

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
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xticks([4, 7, 11, 15, 40])
        finish(axes, f"{data['model']}, state in {state_dtype}", "nodes of the tree", "MiB a sequence for states")


def draw_policies(data: dict[str, Any]) -> None:
    """Draw the time of verify and commit over store_all's, over the batch, a pane a shape and tree."""
    keys = list(dict.fromkeys((row["model"], row["tree"]) for row in data["rows"]))
    _, panes = plt.subplots(2, -(-len(keys) // 2), figsize=(9, 6.4), squeeze=False)
    for axes, (model, tree) in zip(panes.flat, keys, strict=False):
        rows = [row for row in data["rows"] if (row["model"], row["tree"]) == (model, tree)]
        base = {
            row["batch"]: row["us_a_layer"] - row.get("saved_us_a_layer", 0.0) for row in rows if row["policy"] == "store_all"
        }
        axes.axhline(1.0, color=COLOURS["store_all"], label="store_all")
        for policy, slots in dict.fromkeys((row["policy"], row["flush_every"]) for row in rows):
            if policy == "store_all":
                continue
            own = [row for row in rows if (row["policy"], row["flush_every"]) == (policy, slots) and row["batch"] in base]
            style = {None: "o-", 8: "v:", 16: "s--", 32: "^-."}[slots]
            label = policy if slots is None else f"{policy}, {slots} tokens"
            times = [row["us_a_layer"] / base[row["batch"]] for row in own]
            axes.plot([row["batch"] for row in own], times, style, color=COLOURS[policy], label=label, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(base), list(base))
        axes.set_ylim(0, max(1.15, axes.get_ylim()[1]))
        finish(axes, f"{model}, {tree}", "rows", "time of a layer over store_all's")


def draw_capacity(data: dict[str, Any]) -> None:
    """Draw tokens a second and p99 time to the first token over the users, tightest budget, Poisson, a row of panes a tree."""
    rows = [row for row in data["rows"] if row["trace"] == "poisson"]
    budget = min(row["budget"] for row in rows)
    trees = list(dict.fromkeys(row["tree"] for row in rows))
    units = {"throughput": "tokens/s", "p99_ttft_ms": "p99 ms to the first token"}
    _, panes = plt.subplots(len(trees), 2, figsize=(9, 3.2 * len(trees)), squeeze=False)
    for pair, tree in zip(panes, trees, strict=True):
        for axes, (name, unit) in zip(pair, units.items(), strict=True):
            for policy, colour in COLOURS.items():
                own = [row for row in rows if (row["tree"], row["policy"], row["budget"]) == (tree, policy, budget)]
                users = [row["concurrency"] for row in own]
                # Where replay runs as reconstruct does, its dashes leave the other line to be seen.
                style = "s--" if policy == "replay" else "o-"
                axes.plot(users, [row[name] for row in own], style, color=colour, label=policy, markersize=4)
            axes.set_xscale("log", base=2)
            axes.set_xticks(users, users)
            axes.minorticks_off()
            if name == "throughput":
                axes.set_ylim(bottom=0)
            else:
                axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:,.0f}")
            finish(axes, f"35B-A3B, ({tree}), budget {budget}", "users", unit)


def draw_time_over_nodes(data: dict[str, Any]) -> None:
    """Draw microseconds of a verification, of its solve alone, and of a library's solve over the nodes, a pane a batch."""
    batches = list(dict.fromkeys(row["batch"] for row in data["rows"]))
    _, panes = plt.subplots(1, len(batches), figsize=(9, 4.2), squeeze=False)
    for axes, batch in zip(panes.flat, batches, strict=True):
        of = {tree: [r for r in data["rows"] if (r["batch"], r["tree"]) == (batch, tree)] for tree in ("chain", "wide")}
        nodes = [row["nodes"] for row in of["chain"]]
        for tree, colour in (("chain", "#b4451f"), ("wide", "#1f6fb4")):
            solve = [max(row["solve_us"], 0.0) for row in of[tree]]
            # Less than a hundredth of what it is a difference of cannot be told from nothing.
            seen = [us if us >= 0.01 * row["verify_us"] else float("nan") for us, row in zip(solve, of[tree], strict=True)]
            axes.plot(nodes, [row["verify_us"] for row in of[tree]], "o-", color=colour, label=f"verify, {tree}", markersize=4)
            axes.plot(nodes, seen, "s--", color=colour, label=f"its solve alone, {tree}", markersize=4)
        axes.plot(nodes, [row["roots_us"] for row in of["chain"]], "-", color="#3a8f5c", label="verify, nothing to solve")
        axes.plot(
            nodes, [row["library_us"] for row in of["chain"]], ":", color="#777777", label="torch.linalg.solve_triangular"
        )
        axes.axhline(of["chain"][0]["read_us"], color="#000000", linewidth=0.8, label="one read of the states")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(nodes, [str(n) if n in (4, 8, 16, 24, 40, 64, 128, 256) else "" for n in nodes])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:,.10g}")
        finish(axes, f"{data['machine']}, {batch} rows", "nodes of the tree", "microseconds")
    share_legend(panes)


def draw_kernels(data: dict[str, Any]) -> None:
    """Draw microseconds of ours and of other projects' kernels, a pane a batch and a group of bars a tree."""
    batches = list(dict.fromkeys(row["batch"] for row in data["rows"]))
    peers = list(dict.fromkeys(name for row in data["rows"] for name in row.get("peers", {})))
    ours = {"read": "one read of the states", "verify": "verify", "commit": "commit", "fused": "both in one kernel"}
    colours = ["#bbbbbb", "#1f6fb4", "#3a8f5c", "#7fb8d8", "#b4451f", "#d98250", "#e8b48f", "#8a6d9b"]
    _, panes = plt.subplots(1, len(batches), figsize=(9, 4.4), squeeze=False)
    for axes, batch in zip(panes.flat, batches, strict=True):
        rows = [row for row in data["rows"] if row["batch"] == batch and row["right"]]
        for index, (name, colour) in enumerate(zip((*ours, *peers), colours, strict=False)):
            times = [row.get(f"{name}_us", row["peers"].get(name, {}).get("us")) for row in rows]
            seen = [(tree + 0.1 * (index - 3.5), us) for tree, us in enumerate(times) if us is not None]
            label = ours.get(name, f"{name}, a full state a node" if name != "fla-core" else "fla-core, path by path")
            if seen:
                axes.bar(*zip(*seen, strict=True), 0.1, color=colour, label=label)
        axes.set_yscale("log")
        axes.set_xticks(range(len(rows)), [f"{WIDTHS.get(row['tree'], row['tree'])}\n{row['nodes']} nodes" for row in rows])
        axes.yaxis.set_major_formatter("{x:,.10g}")
        finish(axes, f"{data['machine']}, {batch} rows", "", "microseconds")
    share_legend(panes)


def share_legend(panes: Any) -> None:
    """Put one legend for all ``panes`` under them."""
    for axes in panes.flat:
        axes.get_legend().remove()
    figure = panes.flat[0].figure
    figure.set_layout_engine("tight", rect=(0, 0.1, 1, 1))
    figure.legend(*panes.flat[0].get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False, fontsize=8)


DRAWINGS: dict[str, Callable[[dict[str, Any]], None]] = {
    "memory": draw_memory,
    "policies": draw_policies,
    "capacity": draw_capacity,
    "kernels": draw_kernels,
    "time_over_nodes": draw_time_over_nodes,
}


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        source = RESULTS / f"{name}.json"
        if not source.exists():
            print(f"{source.name} is not there: run bench/{name}.py first")
            continue
        draw(json.loads(source.read_text()))
        if not plt.gcf().legends:
            plt.tight_layout()
        plt.savefig(PICTURES / f"{name}.png", dpi=130)
        plt.close("all")
        print(f"docs/pictures/{name}.png")


if __name__ == "__main__":
    main()
