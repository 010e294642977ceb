"""Measure on a GPU what one decoding step of a hybrid mixture-of-experts model takes under each commit policy.

    python -m bench.capacity_steps --batch 64 --out FILE      one batch size, every policy: the work of one process

The model is transformers' own Qwen3.5-35B-A3B with random weights, but of one period: three linear layers and one of softmax
attention, 4 of 40. The forward and the choice of a path run as one CUDA graph; compiled by treewy. The commit is timed on a
full cache of all 40 layers (bench/capacity.py).
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from bench.graph_timing import capture
from treewy_inductor import DraftTree, TreeCache, greedy_accept
from treewy_inductor.backend import treewy

POLICIES = ("store_all", "reconstruct", "replay")
MAX_LENGTH = 2048
DEVICE = "cuda"
# Relative difference that bfloat16 logits of one step may have between policies.
SAME = 0.05
# Tokens already in every row while steps are timed.
COMMITTED = 700


def one_period(layers: int = 4) -> torch.nn.Module:
    """Return the model on the GPU in bfloat16: random weights, ``layers`` layers of the published shapes."""
    config = Qwen3_5MoeTextConfig(num_hidden_layers=layers)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            return Qwen3_5MoeForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def measured(run: Any, steps: int = 30) -> dict[str, float]:
    """Return the milliseconds of one replay of a CUDA graph of ``run``: median, p10 and p90."""
    graph = capture([run], 1)
    for _ in range(3):
        graph.replay()
    pairs = []
    for _ in range(steps):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in pairs)
    return {"ms": statistics.median(times), "p10": times[len(times) // 10], "p90": times[-1 - len(times) // 10]}


@torch.no_grad()
def measure(batch: int, tree: DraftTree, lock: Path) -> dict[str, Any]:
    """Return the times of forward and acceptance for each policy at ``batch``, and of embedding and output matrix alone."""
    model = one_period()
    nodes = len(tree.parents)
    tokens = torch.randint(0, model.config.vocab_size, (batch, nodes), device=DEVICE)
    found: dict[str, Any] = {"batch": batch, "nodes": nodes, "layers": 4}
    outputs = {}
    for policy in POLICIES:
        cache = TreeCache(
            model.config, batch, MAX_LENGTH, nodes, dtype=torch.bfloat16, device=DEVICE, mamba_state_commit=policy
        )
        torch.manual_seed(1)
        cache.encoding.compiled = False
        cache.set_tree(tree)
        cache.lengths.fill_(COMMITTED)
        for tensor in (cache.keys, cache.values, cache.history):
            tensor.normal_()
        cache.state.copy_(0.1 * torch.randn(cache.state.shape[2:], device=DEVICE))
        step = torch.compile(model, backend=treewy, fullgraph=True, dynamic=False)
        arguments = cache.inputs(tokens)

        def run(cache: TreeCache = cache, step: Any = step, arguments: Any = arguments) -> Any:
            cache.position_ids.copy_(cache.encoding.positions(cache.lengths))
            cache.encoding.fill_mask(cache.mask, cache.lengths)
            logits = step(**arguments).logits
            return logits, greedy_accept(logits, cache.tokens, cache.encoding)

        outputs[policy] = run()[0].float()
        with lock.open("w") as file:
            # Other processes compile meanwhile, but only one uses the GPU.
            fcntl.flock(file, fcntl.LOCK_EX)
            found[policy] = measured(run)
        torch._dynamo.reset()
        del cache, step, arguments, run
        gc.collect()
    exact = outputs["reconstruct"]
    found["differences"] = {policy: float((outputs[policy] - exact).norm() / exact.norm()) for policy in POLICIES}
    if not max(found["differences"].values()) <= SAME:
        raise ValueError(
            f"logits differ from reconstruct's by {found['differences']}, expected at most {SAME}: no time is given"
        )
    hidden = torch.randn(batch, nodes, model.config.hidden_size, device=DEVICE, dtype=torch.bfloat16)

    def ends() -> Any:
        return model.model.embed_tokens(tokens), model.lm_head(hidden).argmax(-1)

    ends()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found["ends"] = measured(ends)
    layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name)
    found["parameters"] = {"period": layers, "ends": sum(p.numel() for p in model.parameters()) - layers}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--widths", default="1,1,1")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lock", type=Path, required=True)
    options = parser.parse_args()
    tree = DraftTree.from_widths([int(width) for width in options.widths.split(",")])
    options.out.write_text(json.dumps(measure(options.batch, tree, options.lock)))


if __name__ == "__main__":
    main()
