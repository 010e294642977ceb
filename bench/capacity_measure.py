"""Run the measurements of bench/capacity.py: forwards by a process a batch size, commits of the whole model by this one."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from treewy_inductor.memory import bytes_of, cache_buffers
from treewy_inductor.model_shapes import model_shape

MODEL = model_shape("qwen3.5-35b-a3b")
POLICIES = ("store_all", "reconstruct", "replay")
BATCHES = {"1,1,1": (1, 16, 64, 128, 256), "3,3,3": (1, 16, 64)}
# Tokens a step of the paper's drafter, root included.
ACCEPTED = {"1,1,1": 3.24, "3,3,3": 3.58}
MAX_LENGTH = 2048


def measure(widths: str) -> dict[str, Any]:
    """Return the times of all batch sizes of a tree: periods by processes of their own, commits by this one."""
    folder = Path(tempfile.mkdtemp())
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "3"}
    workers = {}
    for batch in BATCHES[widths]:
        command = [sys.executable, "-m", "bench.capacity_steps", "--batch", str(batch), "--widths", widths]
        command += ["--out", str(folder / f"{batch}.json"), "--lock", str(folder / "lock")]
        log = (folder / f"{batch}.log").open("w")
        workers[batch] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    found: dict[str, Any] = {}
    for batch, worker in workers.items():
        if worker.wait() != 0:
            print(f"batch {batch} failed: {(folder / f'{batch}.log').read_text()[-2000:]}")
            continue
        found[str(batch)] = json.loads((folder / f"{batch}.json").read_text())
    for batch in found:
        found[batch]["commit"] = {policy: measure_commit(policy, int(batch), widths) for policy in POLICIES}
    return found


def measure_commit(policy: str, batch: int, widths: str) -> dict[str, Any]:
    """Return the milliseconds of a commit of all layers, and the bytes of the cache as allocated and as counted."""
    import torch
    from transformers import Qwen3_5MoeTextConfig

    from bench.graph_timing import capture
    from bench.policy_steps import random_paths
    from treewy_inductor import DraftTree, TreeCache
    from treewy_inductor.lowerings.register import register_lowerings

    register_lowerings()
    tree = DraftTree.from_widths([int(width) for width in widths.split(",")])
    nodes = len(tree.parents)
    gc.collect()
    torch.cuda.empty_cache()
    counted = bytes_of(cache_buffers(MODEL, batch=batch, nodes=nodes, max_length=MAX_LENGTH, policy=policy))
    if counted > 0.95 * torch.cuda.mem_get_info()[0]:
        return {"ms": None, "allocated": None, "counted": counted}
    before = torch.cuda.memory_allocated()
    cache = TreeCache(
        Qwen3_5MoeTextConfig(), batch, MAX_LENGTH, nodes, dtype=torch.bfloat16, device="cuda", mamba_state_commit=policy
    )
    allocated = torch.cuda.memory_allocated() - before
    cache.encoding.compiled = False
    cache.set_tree(tree)
    paths = random_paths(tree, batch, 24, ACCEPTED[widths]).cuda()
    path = torch.full((batch, nodes), -1, dtype=torch.int32, device="cuda")
    path[:, : paths.shape[2]] = paths[0]
    graph = capture([lambda: cache.commit_tensors(path)], 1)
    times = []
    for which in [*paths, *paths]:
        path[:, : paths.shape[2]] = which
        cache.lengths.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {"ms": float(np.mean(times[24:])), "allocated": allocated, "counted": counted}


def step_times(measured: dict[str, Any], policy: str) -> tuple[list[int], list[float]]:
    """Return batch sizes and the seconds of a step of the whole model under ``policy``."""
    batches, seconds = [], []
    for batch, found in sorted(measured.items(), key=lambda item: int(item[0])):
        commit = found["commit"][policy]["ms"]
        if commit is None:
            continue
        periods = MODEL.linear_layers + MODEL.softmax_layers
        period = found[policy]["ms"] - found["ends"]["ms"]
        batches.append(int(batch))
        seconds.append((found["ends"]["ms"] + period * periods / found["layers"] + commit) / 1e3)
    return batches, seconds
