"""Tables and ratios of bench/capacity.py: memory-bound and headroom points apart, never one average."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.capacity_measure import POLICIES

BUDGETS = (0.6, 0.75, 0.9)
CONCURRENCY = (1, 8, 32, 64, 128, 256)


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Print one table a tree and budget: a line a concurrency, Poisson arrivals, the policies side by side."""
    for widths in dict.fromkeys(row["tree"] for row in rows):
        for budget in BUDGETS:
            print(f"tree ({widths}), budget {budget}: admitted, tokens/s, p99 ms to the first token, ms a token")
            print("users bound    " + "  ".join(f"{policy:^28}" for policy in POLICIES))
            for concurrency in CONCURRENCY:
                at = {
                    row["policy"]: row
                    for row in rows
                    if (row["tree"], row["trace"], row["budget"], row["concurrency"])
                    == (widths, "poisson", budget, concurrency)
                }
                if at:
                    cells = (
                        f"{at[p]['admitted']:4} {at[p]['throughput']:7.0f} {at[p]['p99_ttft_ms']:8.0f} {at[p]['tpot_ms']:6.2f}"
                        for p in POLICIES
                    )
                    print(f"{concurrency:5} {at['store_all']['bound']:8} " + "  ".join(cells))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, for each tree, bound and policy, the geometric means of its figures over store_all's at the same points."""
    ratios: dict[tuple[str, str, str], list[tuple[float, float, float, float]]] = {}
    base = {(row["tree"], row["trace"], row["budget"], row["concurrency"]): row for row in rows if row["policy"] == "store_all"}
    for row in rows:
        other = base[row["tree"], row["trace"], row["budget"], row["concurrency"]]
        if row is not other:
            ratios.setdefault((row["tree"], row["bound"], row["policy"]), []).append(
                (
                    row["throughput"] / other["throughput"],
                    other["p99_ttft_ms"] / row["p99_ttft_ms"],
                    other["tpot_ms"] / row["tpot_ms"],
                    other["step_ms"] / row["step_ms"],
                )
            )
    names = ("throughput", "p99_ttft", "tpot", "step")
    return {
        f"{tree} {bound} {policy}": {"points": len(found)}
        | {
            name: round(float(np.exp(np.mean(np.log(values)))), 3)
            for name, values in zip(names, zip(*found, strict=True), strict=True)
        }
        for (tree, bound, policy), found in ratios.items()
    }


def print_step_times(measured: dict[str, Any]) -> None:
    """Print a line a tree and batch size: a period's forward and the whole model's commit, the policies side by side."""
    for widths, found in measured["trees"].items():
        for batch, times in found.items():
            parts = "  ".join(f"{policy} {times[policy]['ms']:.3f} + {_commit(times['commit'][policy])}" for policy in POLICIES)
            print(f"({widths}) batch {batch:>3}, ms of a period: {parts}; ends {times['ends']['ms']:.3f}")
            if times.get("kernels"):
                print_kernels(times["kernels"])


def print_kernels(kernels: dict[str, dict[str, tuple[float, float]]], most: int = 25) -> None:
    """Print the kernels whose times differ most between store_all and reconstruct: microseconds and launches a period."""
    base, ours = kernels["store_all"], kernels["reconstruct"]
    sums = " ".join("{:.1f} ({:.0f})".format(*map(sum, zip(*each.values(), strict=True))) for each in (base, ours))
    print(f"    us (launches) of a period, store_all and reconstruct: {sums}")
    absent = (0.0, 0.0)
    pairs = {name: (base.get(name, absent), ours.get(name, absent)) for name in base | ours}
    for name, pair in sorted(pairs.items(), key=lambda item: -abs(item[1][0][0] - item[1][1][0]))[:most]:
        print("    " + " ".join(f"{us:7.1f} ({count:2.0f})" for us, count in pair) + f" {name[:80]}")


def _commit(commit: dict[str, Any]) -> str:
    """Return what a commit took, or why it was not timed."""
    if commit["ms"] is None:
        return f"no commit: all layers' cache is {commit['counted'] / 2**30:.0f} GiB, more than the GPU has free"
    return f"commit {commit['ms']:.3f}"
