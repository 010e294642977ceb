"""Which tiles make the kernels of the commit policies fastest: one full state a node, and the deferred commit.

    python -m bench.tune_policies [--kernels snapshots commit_trunk]

Qwen3.5-35B-A3B's heads, bf16, float32 states. Tiles are compiled by processes side by side. A tile's time is printed only if
its results at that very shape are the reference's. Results go to bench/results/policies_tune.json; the best, for few heads and
for many the one that is fastest over the trees, stand in the kernels' host wrappers.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.graph_timing import capture, sorted_us, time_calls
from bench.kernel_cases import relative_error
from bench.machine import machine_line
from bench.policies import ACCEPTED, OUTPUT_BOUND, STATE_BOUND, TREES
from bench.policy_steps import NORM_EPS, PolicyStep, policy_step, random_paths, scatter_trunks, set_path
from treewy_inductor import reference_replay, reference_store_all
from treewy_inductor.lowerings.commit_trunk import launch_commit_trunk
from treewy_inductor.lowerings.configurations import CommitTile
from treewy_inductor.lowerings.launch import EAGER
from treewy_inductor.lowerings.register import register_lowerings
from treewy_inductor.lowerings.tree_gated_delta_snapshots import SnapshotTile, launch_tree_gated_delta_snapshots
from treewy_inductor.model_shapes import MODELS
from treewy_inductor.state_policies import ReplayStates, StoreAllStates
from treewy_inductor.tree import DraftTree

RESULTS = Path(__file__).parent / "results"
SHAPE = MODELS["qwen3.5-35b-a3b"].linear
SNAPSHOT_TILES = ((32, 4), (32, 2), (16, 1), (16, 2), (16, 4), (8, 1), (64, 4), (64, 8), (128, 8))
COMMIT_TILES = ((32, 4), (32, 2), (64, 4), (64, 8), (16, 2), (128, 8))
TRUNK = 16


def snapshot_call(step: PolicyStep, slot: int, tile: SnapshotTile) -> Tensor:
    """Run one layer's verification and return its output."""
    states, inputs = step.states, step.inputs[slot]
    assert isinstance(states, StoreAllStates)
    operands = (*inputs, step.encoding.parents, states.accepted, states.snapshots[slot])
    output: Tensor = launch_tree_gated_delta_snapshots(
        EAGER, *operands, SHAPE.key_dim**-0.5, NORM_EPS, torch.bfloat16, tile=tile
    ).handle
    return output


def snapshot_errors(step: PolicyStep, tile: SnapshotTile, rows: int = 2) -> tuple[float, float]:
    """Return the relative errors of output and states of the first ``rows`` rows."""
    states = step.states
    assert isinstance(states, StoreAllStates)
    exact_states = states.snapshots[0, :rows].double()
    arguments: tuple[Any, ...] = (
        *(x[:rows].double() for x in step.inputs[0]),
        *(step.encoding.parents[:rows], states.accepted[:rows], exact_states, SHAPE.key_dim**-0.5, NORM_EPS, torch.float64),
    )
    exact = reference_store_all.tree_gated_delta_snapshots(*arguments)
    output = snapshot_call(step, 0, tile)
    return relative_error(output[:rows], exact), relative_error(states.snapshots[0, :rows], exact_states)


def tune_snapshots(tree: str, batch: int) -> list[dict[str, Any]]:
    """Return one row a tile of the kernel that writes every node's state."""
    layers = max(2, 256 // batch // 8)
    step = policy_step("store_all", None, SHAPE, DraftTree.from_widths(TREES[tree]), layers, batch)
    rows = []
    for tile in map(SnapshotTile._make, SNAPSHOT_TILES):
        errors = snapshot_errors(step, tile)
        row: dict[str, Any] = {"kernel": "snapshots", "tree": tree, "batch": batch, "tile": list(tile), "errors": errors}
        if errors[0] <= OUTPUT_BOUND and errors[1] <= STATE_BOUND:
            calls = [lambda slot=slot, tile=tile: snapshot_call(step, slot, tile) for slot in range(layers)]
            row["us"] = time_calls(calls, replays=5).median
        rows.append(row)
    return rows


def tune_commit(tree: str, batch: int, layers: int = 8) -> list[dict[str, Any]]:
    """Return one row a tile of the deferred commit: the mean over steps in which some rows append and others fold."""
    drafts = DraftTree.from_widths(TREES[tree])
    step = policy_step("replay", TRUNK, SHAPE, drafts, layers, batch)
    states = step.states
    assert isinstance(states, ReplayStates)
    for tensor in (states.state, states.trunk_keys, states.trunk_values, states.node_keys, states.pseudo_values):
        tensor.normal_()
    states.key_scale.fill_(0.1)
    states.trunk_scale.fill_(0.1)
    paths = random_paths(drafts, batch, 24, ACCEPTED[tree]).cuda()
    rows = []
    for tile in map(CommitTile._make, COMMIT_TILES):
        error = commit_error(step, paths[0], commit_call(step, tile))
        row: dict[str, Any] = {"kernel": "commit_trunk", "tree": tree, "batch": batch, "tile": list(tile), "errors": [error]}
        if error <= STATE_BOUND:
            scatter_trunks(step.states)
            graph = capture([commit_call(step, tile)], 1)
            times = []
            for which in [*paths, *paths]:
                set_path(step, which)
                times += sorted_us(graph.replay, 1)
            row["us"] = statistics.fmean(times[len(paths) :]) / layers
        rows.append(row)
    return rows


def commit_call(step: PolicyStep, tile: CommitTile) -> Callable[[], None]:
    """Return a call that commits the step's path with ``tile``."""
    states = step.states
    assert isinstance(states, ReplayStates)
    tensors = (
        *(states.state, states.trunk_keys, states.trunk_scale, states.trunk_values, states.trunk_decay, states.trunk_length),
        *(states.node_keys, states.key_scale, states.pseudo_values, states.path_decay, step.path),
    )
    return lambda: launch_commit_trunk(EAGER, *tensors, tile=tile)


def commit_error(step: PolicyStep, paths: Tensor, call: Callable[[], None], rows: int = 8) -> float:
    """Return the relative error of the states of the first ``rows`` rows after one commit; half of them fold."""
    states = step.states
    assert isinstance(states, ReplayStates)
    set_path(step, paths)
    states.trunk_length.copy_(torch.arange(len(states.trunk_length)) % 2 * TRUNK)
    exact = {name: x[:, :rows].double() for name, x in states.tensors().items() if x.dim() > 1}
    arguments: tuple[Tensor, ...] = (
        *(exact[name] for name in ("state", "trunk_keys", "trunk_scale", "trunk_values", "trunk_decay")),
        states.trunk_length[:rows].clone(),
        *(exact[name] for name in ("node_keys", "key_scale", "pseudo_values", "path_decay")),
        step.path[:rows],
    )
    reference_replay.commit_trunk(*arguments)
    call()
    return relative_error(states.state[:, :rows], exact["state"])


CASES: dict[str, tuple[Callable[[str, int], list[dict[str, Any]]], tuple[tuple[str, int], ...]]] = {
    "snapshots": (tune_snapshots, (("(1,1,1)", 8), ("(1,1,1)", 128), ("(3,3,3)", 8), ("(3,3,3)", 64))),
    "commit_trunk": (tune_commit, (("(1,1,1)", 8), ("(1,1,1)", 128))),
}


def compile_tile(kernel: str, tile: tuple[int, int]) -> None:
    """Leave the kernel compiled with one tile for the batch sizes that are timed."""
    register_lowerings()
    for batch in (2, 8, 16):
        chain = DraftTree.from_widths((1, 1, 1))
        if kernel == "snapshots":
            snapshot_call(policy_step("store_all", None, SHAPE, chain, 1, batch), 0, SnapshotTile(*tile))
        else:
            commit_call(policy_step("replay", TRUNK, SHAPE, chain, 1, batch), CommitTile(*tile))()
    torch.cuda.synchronize()


def best_tiles(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Return by kernel, for few heads and for many, the tile with the least geometric mean of times over the trees."""
    times: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for row in rows:
        if "us" in row:
            size = "few" if row["batch"] <= 8 else "many"
            times.setdefault(f"{row['kernel']}, {size}", {}).setdefault(tuple(row["tile"]), []).append(row["us"])
    found = {}
    for name, tiles in times.items():
        most = max(map(len, tiles.values()))
        found[name] = list(min((t for t in tiles if len(tiles[t]) == most), key=lambda t: statistics.geometric_mean(tiles[t])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    machine = machine_line("bf16, fp32 state")
    print(machine, flush=True)
    tiles = {"snapshots": SNAPSHOT_TILES, "commit_trunk": COMMIT_TILES}
    compiles = [(kernel, tile) for kernel in options.kernels for tile in tiles[kernel]]
    with ProcessPoolExecutor(len(compiles), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_tile, *zip(*compiles, strict=True)))
    register_lowerings()
    rows: list[dict[str, Any]] = []
    for kernel in options.kernels:
        tune, cases = CASES[kernel]
        for tree, batch in cases:
            found = tune(tree, batch)
            rows += found
            shown = "  ".join(
                f"{tuple(row['tile'])} {row['us']:.1f}" if "us" in row else f"{row['tile']} wrong" for row in found
            )
            print(f"{kernel:>12} {tree} batch {batch:>3}, us a layer: {shown}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    options.out.mkdir(parents=True, exist_ok=True)
    best = best_tiles(rows)
    data = {"machine": machine, "best": best, "rows": rows}
    (options.out / "policies_tune.json").write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps({"rows": len(rows), "wrong": sum("us" not in row for row in rows), "best": best}))


if __name__ == "__main__":
    main()
