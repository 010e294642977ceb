"""Fill the tables of docs/results.md from bench/results: ``python -m bench.results_page``.

A table stands between ``<!-- NAME from FILES -->`` and ``<!-- end -->`` and is written anew from ``bench/results/FILE.json``;
one whose file is not there is left as it is. The sentences around the tables are written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.capacity_measure import POLICIES, SERVED_SHAPES, nodes_of, step_times
from bench.results_bars import bar_lines, point
from bench.results_kernels import check_lines, kernel_lines, peer_lines, sanitizer_lines, solve_lines
from bench.results_step import step_lines
from treewy_inductor.layer_shapes import default_flush_every

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
REGION = re.compile(r"(<!-- (?P<name>\w+) from (?P<files>[\w, ]+) -->\n)(?P<table>.*?)(<!-- end -->)", re.DOTALL)
Row = dict[str, Any]
FORMER_TILE = """
(†) Timed with the former tile of `store_all`'s kernel; given less what the present one saves, 19 to 32% of a verification, as
measured with both at as many states (`bench/results/policies_tune.json`; the 397B shapes at cc4d3b4 and at cbe172b).
"""


def table(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table; numbers that are not whole keep two digits after the point."""
    cells = [head, ["---"] * len(head), *([f"{x:,.2f}" if isinstance(x, float) else str(x) for x in line] for line in lines)]
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)


def memory(data: Row) -> str:
    """MiB a sequence for states and what stands in for them, a line a tree and dtype."""
    found = {(tuple(row["widths"]), row["state_dtype"], row["policy"]): row for row in data["rows"]}
    lines = []
    for widths in ((1, 1, 1), (2, 2, 2), (3, 3, 3)):
        for dtype in ("bfloat16", "float32"):
            own = [found[widths, dtype, policy]["state_mib"] for policy in ("store_all", "replay", "reconstruct")]
            nodes = found[widths, dtype, "replay"]["nodes"]
            lines.append([str(widths).replace(" ", ""), nodes, dtype, *own, f"{own[0] / own[2]:.1f}"])
    return table(["tree", "nodes", "state", "`store_all`", "`replay`", "`reconstruct`", "ratio"], lines)


def layers(data: Row) -> str:
    """Microseconds a layer for verify and commit, a line a shape, tree and batch."""
    lines = []
    groups = dict.fromkeys((row["model"], row["tree"], row["batch"]) for row in data["rows"])
    for model, tree, batch in groups:
        rows = [row for row in data["rows"] if (row["model"], row["tree"], row["batch"]) == (model, tree, batch)]
        own = {(row["policy"], row["flush_every"]): row["us_a_layer"] - row.get("saved_us_a_layer", 0.0) for row in rows}
        times = [own.get(("replay", slots)) for slots in (8, 16, 32)]
        base, ours = own.get(("store_all", None)), own.get(("reconstruct", None))
        ratios = [_over(base, ours), _over(ours, times[1])]
        cells = [f"{time:.1f}" if time else "·" for time in (base, ours, *times)]
        if any("saved_us_a_layer" in row for row in rows):
            cells[0] += " (†)"
        lines.append([model.replace("Qwen3.5-", ""), tree, batch, *cells, *ratios, _commit(rows[0], data)])
    head = ["shape", "tree", "batch", "`store_all`", "`reconstruct`", "`replay`, 8", "16", "32"]
    caption = f"{data['machine'].rpartition(' | ')[0]}; microseconds a layer.\n\n"
    return (
        caption + table([*head, "`store_all` / `reconstruct`", "`reconstruct` / `replay`, 16", "commit"], lines) + FORMER_TILE
    )


def _commit(row: Row, data: Row) -> str:
    """Return the commit at which a row was measured."""
    return str(row.get("machine", data["machine"]).rpartition(" | ")[2])


def steps(data: Row) -> str:
    """Milliseconds of a step of the whole model, a line a tree and batch."""
    model = SERVED_SHAPES["35b"]
    lines, too_large = [], []
    for widths, found in data["trees"].items():
        whole = {batch: row for batch, row in found.items() if "commit" in row}
        times = {policy: dict(zip(*step_times(model, whole, policy), strict=True)) for policy in POLICIES}
        for batch in sorted(int(batch) for batch in whole):
            own = [1e3 * times[policy][batch] if batch in times[policy] else None for policy in POLICIES]
            cells = [f"{ms:.2f}" if ms else "·" for ms in own]
            if "saved_us_a_layer" in whole[str(batch)]["store_all"]:
                cells[0] += " (†)"
            for index, policy in enumerate(POLICIES):
                commit = whole[str(batch)]["commit"][policy]
                if commit["ms"] is None:
                    cells[index] += " (*)"
                    too_large.append(f"`{policy}`, ({widths}), {batch} rows: {commit['counted'] / 2**30:.0f} GiB")
            slots = default_flush_every(nodes_of(widths), batch * model.linear.value_heads)
            lines.append([f"({widths})", batch, *cells, slots if slots > 1 else "none", _over(own[0], own[1])])
            lines[-1].append(_commit(whole[str(batch)], data))
    head = ["tree", "batch", *(f"`{policy}`" for policy in POLICIES), "trunk", "`store_all` / `reconstruct`", "commit"]
    page = f"{data['machine'].rpartition(' | ')[0]}; milliseconds a step.\n\n" + table(head, lines)
    page += FORMER_TILE * any("(†)" in line[2] for line in lines)
    if too_large:
        page += (
            f"\n(*) No server could run this: the cache of all layers ({'; '.join(too_large)}) is larger than the memory\n"
            f"of the GPU, {data['gpu_bytes'] / 2**30:.0f} GiB. The forward of one period fits and was timed; the commit, a "
            "note of which block is committed,\nis that of the largest cache that fits.\n"
        )
    return page


def headline(data: Row) -> str:
    """Geometric means over store_all at the same points, memory-bound points and headroom apart."""
    paper = {
        ("memory", "throughput"): "1.15",
        ("memory", "p99_ttft"): "2.94",
        ("memory", "tpot"): "0.83",
        ("headroom", "tpot"): "0.97 to 0.99",
    }
    names = {"throughput": "throughput", "p99_ttft": "p99 time to the first token, lower by", "tpot": "speed per token"}
    columns = [(tree, policy) for tree in ("1,1,1", "3,3,3") for policy in POLICIES[1:]]
    lines = []
    for bound in ("memory", "headroom"):
        own = [data["summary"].get(f"{tree} {bound} {policy}", {}) for tree, policy in columns]
        label = {"memory": "memory-bound", "headroom": "headroom"}[bound]
        lines.append([f"{label}: points", {"memory": "31 of 105", "headroom": "74 of 105"}[bound], *_each(own, "points")])
        for name, words in names.items():
            lines.append([f"{label}: {words}", paper.get((bound, name), "within a few %"), *_each(own, name)])
        if bound == "headroom":
            lines.append([f"{label}: time of a step, lower by", "not reported", *_each(own, "step")])
    own = [data["paced_summary"].get(f"{tree} memory {policy}", {}) for tree, policy in columns]
    for name, words in names.items():
        lines.append([f"memory-bound, no slower: {words}", "not reported", *_each(own, name)])
    lines.append(["best throughput of one point", "1.49", *(f"{max(_ratios(data, *each)):.2f}" for each in columns)])
    at = {(row["tree"], row["policy"]): row for row in data["rows"] if point(row)[1:] == ("poisson", 0.6, 128)}
    waits = [
        [at[tree, each]["p99_ttft_ms"] for each in ("store_all", policy)] if at.get((tree, policy)) else []
        for tree, policy in columns
    ]
    cells = [f"{wait[0]:,.0f} to {wait[1]:,.0f} ms" if wait else "·" for wait in waits]
    lines.append(["p99 time to the first token, 128 users at 0.6", "27,489 to 683 ms", *cells])
    return table(["over `store_all`", "paper, 35B, chain", *(f"({tree}) `{policy}`" for tree, policy in columns)], lines)


def points(data: Row) -> str:
    """The tightest budget, Poisson arrivals: what each policy admits and what users then see."""
    budget = min(row["budget"] for row in data["rows"])
    own = [row for row in data["rows"] if (row["budget"], row["trace"]) == (budget, "poisson")]
    lines = []
    for tree, users in dict.fromkeys((row["tree"], row["concurrency"]) for row in own):
        at = {row["policy"]: row for row in own if (row["tree"], row["concurrency"]) == (tree, users)}
        cells = [
            " / ".join(f"{at[policy][name]:,.{digits}f}" for policy in POLICIES)
            for name, digits in (("admitted", 0), ("throughput", 0), ("p99_ttft_ms", 0), ("tpot_ms", 2))
        ]
        lines.append([f"({tree})", users, at["store_all"]["bound"], *cells])
    head = ["tree", "users", "bound", "admitted", "tokens/s", "p99 ms to the first token", "ms a token"]
    return f"Budget {budget}; each cell: `store_all` / `reconstruct` / `replay`.\n\n" + table(head, lines)


def bars(capacity: Row, policies: Row, steps: Row) -> str:
    """What was asked for and what was found."""
    head = ["bar", "asked", *(f"`{policy}`" for policy in POLICIES[1:]), ""]
    caption = "Two numbers are geometric means over the points of (1,1,1) and of (3,3,3); then at how many points it is so.\n\n"
    return caption + table(head, bar_lines(capacity, policies, steps))


def kernels(data: Row) -> str:
    """Verify, commit and both fused beside what memory alone costs, a line a tree and batch."""
    head = ["tree", "batch", "read, us", "verify, us (p10-p90)", "over the read", "copy, us", "commit, us", "over the copy"]
    head += ["fused step, us", "over the copy", "error of `u`", "of states", "of outputs"]
    return _measured(data) + table(head, kernel_lines(data))


def peers(data: Row) -> str:
    """Other kernels on the same cases, a line a tree and batch."""
    names = ["store_all", "SGLang", "vLLM", "fla-core"]
    head = ["tree", "batch", "our verify, us", *names, "best of full states over verify"]
    return _measured(data) + table(head, peer_lines(data, names))


def solve(data: Row) -> str:
    """The solve alone over the nodes, a line a tree and size, at the largest batch."""
    head = ["nodes", "tree", "batch", "verify, us", "nothing to solve, us", "solve alone, us", "`solve_triangular`, us"]
    return _measured(data) + table(head, solve_lines(data))


def whole_step(data: Row) -> str:
    """A whole step as one graph beside one token of stock decoding, a line a model, batch and way to compile layers."""
    head = ["model", "batch", "layers", "one token, stock, us (p10-p90)", "tree step, us (p10-p90)", "ratio"]
    head += ["step without a graph, us", "first compile, s", "commit"]
    return table(head, step_lines(data))


def checks(data: Row) -> str:
    """The table's tiles against float64, a line a kernel and kinds of numbers."""
    lines = check_lines(data)
    head = ["kernel", "inputs", "states", "shapes right", "largest error of `u`", "of states"]
    return f"Commit {data['commit']}.\n\n{table(head, lines)}" if lines else "*not measured*\n"


def sanitizer(data: Row) -> str:
    """What compute-sanitizer's tools found, a line each."""
    control = f"a kernel that strays on purpose was {data['straying_kernel']}"
    return f"{data['machine']}, {data['date']}; {control}.\n\n" + table(
        ["tool", "tests passed", "found"], sanitizer_lines(data)
    )


def _measured(data: Row) -> str:
    versions = f"torch {data['torch']}, triton {data['triton']}"
    return f"{data['machine']}, {versions}, commit {data['commit']}; heads 16/32, dims 128/128, bf16, float32 state.\n\n"


def _ratios(data: Row, tree: str, policy: str) -> list[float]:
    """Return the throughput of ``policy`` over store_all's at every point of ``tree``."""
    base = {point(row): row["throughput"] for row in data["rows"] if row["policy"] == "store_all"}
    return [row["throughput"] / base[point(row)] for row in data["rows"] if (row["tree"], row["policy"]) == (tree, policy)]


def _each(found: Sequence[Row], name: str) -> list[str]:
    values = [each.get(name, "·") for each in found]
    return [f"{value:.2f}" if isinstance(value, float) else str(value) for value in values]


def _over(one: float | None, other: float | None) -> str:
    return f"{one / other:.2f}" if one and other else "·"


WRITERS = (memory, layers, steps, headline, points, kernels, peers, solve, checks, sanitizer, whole_step, bars)
TABLES: dict[str, Callable[..., str]] = {each.__name__: each for each in WRITERS}


def filled(page: str) -> str:
    """Return ``page`` with every table whose files are there written anew."""

    def write(match: re.Match[str]) -> str:
        files = [RESULTS / f"{name}.json" for name in match["files"].split(", ")]
        if not all(file.exists() for file in files):
            return match[0]
        return f"{match[1]}\n{TABLES[match['name']](*(json.loads(file.read_text()) for file in files))}\n{match[5]}"

    return REGION.sub(write, page)


def main() -> None:
    page = PAGE.read_text()
    PAGE.write_text(filled(page))
    print(f"{PAGE.name}: {len(REGION.findall(page))} tables, changed: {filled(page) != page}")


if __name__ == "__main__":
    main()
