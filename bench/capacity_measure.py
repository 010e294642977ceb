"""Run the measurements of bench/capacity.py: steps by a process a case, commits of the whole model by this one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
from collections.abc import Callable
from typing import Any

import numpy as np

from treewy_inductor.layer_shapes import default_flush_every
from treewy_inductor.memory import bytes_of, cache_buffers, nodes_of_widths, state_bytes
from treewy_inductor.model_shapes import MODELS, ModelShape

POLICIES = ("store_all", "reconstruct", "replay")
BATCHES = {"1,1,1": (1, 16, 64, 256), "3,3,3": (1, 16, 64)}
# Tokens a step of the paper's drafter, root included.
ACCEPTED = {"1,1,1": 3.24, "3,3,3": 3.58}
MAX_LENGTH = 2048
# What logits of one step in bfloat16 may differ by, in the median over nodes, between policies. The median, since a router that
# is undecided between two experts may choose another for the same number rounded otherwise.
SAME = 0.05
SERVED_SHAPES = {"35b": MODELS["qwen3.5-35b-a3b"], "397b-rank": MODELS["qwen3.5-397b-a17b"].shard(8)}


def measure(
    name: str,
    trees: list[str],
    batches: list[int] | None,
    is_split: bool,
    save: Callable[[dict[str, dict[str, Any]]], None],
) -> None:
    """Give ``save`` the times of steps and commits of the served model ``name``, by tree and batch size, as they come.

    Failed cases are left out; commits are timed last, on an empty GPU.

    Args:
        batches: to measure in place of all.
        is_split: a process compiles one policy rather than all, which takes less time and, for the model, more memory.
    """
    from bench.capacity_steps import run_case

    sizes = [(widths, batch) for widths in trees for batch in BATCHES[widths] if batches is None or batch in batches]
    cases = [(*size, group) for size in sizes for group in policy_groups(SERVED_SHAPES[name], *size, is_split)]
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")
    context = multiprocessing.get_context("spawn")
    barrier, turn, results = context.Barrier(len(cases)), context.Lock(), context.Queue()
    workers = [context.Process(target=run_case, args=(name, *case, barrier, turn, results)) for case in cases]
    for worker in workers:
        worker.start()
    came = 0
    found: dict[str, dict[str, Any]] = {widths: {} for widths in trees}
    begun: dict[tuple[str, int], dict[str, Any]] = {}
    while came < len(cases) and (any(worker.is_alive() for worker in workers) or not results.empty()):
        try:
            part = results.get(timeout=5)
        except queue.Empty:
            continue
        came += 1
        size = part["widths"], part["batch"]
        label = f"({size[0]}) batch {size[1]}"
        if "error" in part:
            print(f"{label} failed: {part['error']}", flush=True)
            continue
        print(f"{label} timed: {', '.join(part['logits'])}", flush=True)
        row = begun[size] = merged(begun.get(size, {}), part)
        if len(row["logits"]) == len(POLICIES):
            differences = row["differences"] = logit_differences(row.pop("logits"))
            if max(differences.values()) <= SAME:
                found[size[0]][str(size[1])] = row
                save(found)
            else:
                print(f"{label}: logits differ by {differences}, expected at most {SAME}: no time is given", flush=True)
    for worker in workers:
        worker.join()
    for row in sorted((row for each in found.values() for row in each.values()), key=lambda row: row["batch"]):
        shape, batch, widths = SERVED_SHAPES[name], row["batch"], row["widths"]
        row["commit"] = {policy: measure_commit(shape, policy, batch, widths) for policy in POLICIES}
        save(found)


def policy_groups(model: ModelShape, widths: str, batch: int, is_split: bool) -> list[tuple[str, ...]]:
    """Return which policies a process compiles: all, or one each; where no token waits replay is reconstruct."""
    if not is_split:
        return [POLICIES]
    if default_flush_every(nodes_of(widths), batch * model.linear.value_heads) == 1:
        return [("store_all",), ("reconstruct", "replay")]
    return [(policy,) for policy in POLICIES]


def merged(row: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a tree and batch size with what one process measured."""
    whole = row | part
    for key in ("kernels", "compile_s", "logits"):
        whole[key] = row.get(key, {}) | part.get(key, {})
    whole["is_alone"] = row.get("is_alone", True) and part["is_alone"]
    return whole


def logit_differences(logits: dict[str, np.ndarray]) -> dict[str, float]:
    """Return how far each policy's logits are from reconstruct's: the median over nodes of the relative difference."""
    exact = logits["reconstruct"]
    size = np.linalg.norm(exact, axis=-1)
    return {policy: float(np.median(np.linalg.norm(each - exact, axis=-1) / size)) for policy, each in logits.items()}


def measure_commit(model: ModelShape, policy: str, batch: int, widths: str) -> dict[str, Any]:
    """Return the milliseconds of a commit of all layers, and bytes of the cache as allocated and as counted.

    The milliseconds are None where a cache of this size does not fit the memory.
    """
    import torch
    from transformers import Qwen3_5MoeTextConfig

    from bench.graph_timing import capture, sorted_us
    from bench.policy_steps import random_paths, scatter_trunks
    from treewy_inductor import DraftTree, TreeCache
    from treewy_inductor.lowerings.register import register_lowerings

    register_lowerings()
    tree = DraftTree.from_widths([int(width) for width in widths.split(",")])
    nodes = len(tree)
    gc.collect()
    torch.cuda.empty_cache()
    buffers = cache_buffers(model, batch=batch, nodes=nodes, max_length=MAX_LENGTH, policy=policy)
    found: dict[str, Any] = {"counted": bytes_of(buffers), "counted_states": state_bytes(buffers)}
    if found["counted"] > 0.95 * torch.cuda.mem_get_info()[0]:
        return found | {"ms": None, "allocated": None}
    before = torch.cuda.memory_allocated()
    cache = TreeCache(
        Qwen3_5MoeTextConfig(),
        batch,
        MAX_LENGTH,
        nodes,
        dtype=torch.bfloat16,
        device="cuda",
        mamba_state_commit=policy,
        layer_shapes=model.layers(),
    )
    found["allocated"] = torch.cuda.memory_allocated() - before
    found["allocated_states"] = sum(tensor.untyped_storage().nbytes() for tensor in cache.states.tensors().values())
    cache.encoding.compiled = False
    cache.set_tree(tree)
    paths = random_paths(tree, batch, 24, ACCEPTED[widths]).cuda()
    path = torch.full((batch, nodes), -1, dtype=torch.int32, device="cuda")
    path[:, : paths.shape[2]] = paths[0]
    scatter_trunks(cache.states)
    graph = capture([lambda: cache.commit_tensors(path)], 1)
    times = []
    for which in [*paths, *paths]:
        path[:, : paths.shape[2]] = which
        cache.lengths.zero_()
        times += [us / 1e3 for us in sorted_us(graph.replay, 1)]
    return found | {"ms": float(np.mean(times[len(paths) :]))}


def step_times(model: ModelShape, measured: dict[str, Any], policy: str) -> tuple[list[int], list[float]]:
    """Return batch sizes and the seconds of a step of the whole model under ``policy``."""
    batches, seconds = [], []
    layers = model.linear_layers + model.softmax_layers
    last_commit = None
    for batch, found in sorted(measured.items(), key=lambda item: int(item[0])):
        commit = found["commit"][policy]["ms"]
        if commit is None and policy == "store_all":
            # It only notes a block, for a cache that does not fit as for the largest that does.
            commit = last_commit
        if commit is None:
            continue
        last_commit = commit
        period = found[policy]["ms"] - found["ends"]["ms"]
        # Of rows that were timed before a kernel had its best tile: what that tile saves, measured on the layers alone.
        period -= found[policy].get("saved_us_a_layer", 0.0) * model.linear_layers * found["layers"] / layers / 1e3
        batches.append(int(batch))
        seconds.append((found["ends"]["ms"] + period * layers / found["layers"] + commit) / 1e3)
    return batches, seconds


def nodes_of(widths: str) -> int:
    """Return the nodes of a tree named by its widths, such as ``3,3,3``."""
    return nodes_of_widths([int(width) for width in widths.split(",")])
