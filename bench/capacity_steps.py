"""Measure on a GPU what one decoding step of a hybrid mixture-of-experts model takes under each commit policy.

The model is transformers' own with random weights, but of one period: three linear layers and one of softmax attention. The
forward and the choice of a path run as one CUDA graph, compiled by treewy. A case, some policies on one tree at one batch size,
is the work of one process: it compiles beside the other cases' processes, waits for them, and is then timed alone. The commit
is timed on a full cache of all layers (bench/capacity_measure.py).
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from bench.graph_timing import capture, kernels_of, sorted_us
from bench.machine import machine_line
from bench.policy_steps import scatter_trunks
from treewy_inductor import DraftTree, TreeCache, greedy_accept
from treewy_inductor.backend import treewy
from treewy_inductor.layer_shapes import default_flush_every

MAX_LENGTH = 2048
DEVICE = "cuda"
PERIOD = 4
# Tokens already in every row while steps are timed.
COMMITTED = 700
# Seconds a case waits for the others' compiles; a time taken while another compiles is marked as not alone.
PATIENCE = 90


# What the configuration of each served model says beside the defaults, which are those of 35B-A3B.
CONFIGURATIONS: dict[str, dict[str, int]] = {
    "35b": {},
    # One of eight ranks: its share of heads, of every expert's channels, of the vocabulary; sums over ranks are left out.
    "397b-rank": {"hidden_size": 4096, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 248320 // 8}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 8, "num_experts": 512, "num_experts_per_tok": 10}
    | {"moe_intermediate_size": 1024 // 8, "shared_expert_intermediate_size": 1024 // 8},
}


def one_period(name: str) -> torch.nn.Module:
    """Return the model on the GPU in bfloat16: random weights, ``PERIOD`` layers of the published shapes."""
    config = Qwen3_5MoeTextConfig(num_hidden_layers=PERIOD, **CONFIGURATIONS[name])
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            return Qwen3_5MoeForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def measured(run: Callable[[], Any], prepare: Callable[[], Any] = lambda: None, steps: int = 20) -> dict[str, float]:
    """Return the milliseconds of one replay of a CUDA graph of ``run``: median, p10 and p90; ``prepare`` runs before each."""
    graph = capture([run], 1)
    times = []
    for _ in range(3 + steps):
        prepare()
        times += sorted_us(graph.replay, 1)
    times = sorted(us / 1e3 for us in times[3:])
    return {"ms": statistics.median(times), "p10": times[len(times) // 10], "p90": times[-1 - len(times) // 10]}


class CompiledStep:
    """Forward and acceptance of one policy on a cache whose rows hold ``COMMITTED`` tokens."""

    def __init__(self, model: torch.nn.Module, tokens: Tensor, tree: DraftTree, policy: str) -> None:
        batch, nodes = tokens.shape
        self.cache = TreeCache(
            model.config, batch, MAX_LENGTH, nodes, dtype=torch.bfloat16, device=DEVICE, mamba_state_commit=policy
        )
        torch.manual_seed(1)
        self.cache.encoding.compiled = False
        self.cache.set_tree(tree)
        self.cache.lengths.fill_(COMMITTED)
        for tensor in (self.cache.keys, self.cache.values, self.cache.history):
            tensor.normal_()
        self.state = 0.1 * torch.randn(self.cache.state.shape[2:], device=DEVICE)
        self.restore()
        # Zero keys and values: a filled trunk costs its time and changes no number.
        scatter_trunks(self.cache.states)
        started = time.perf_counter()
        self.step = torch.compile(model, backend=treewy, fullgraph=True, dynamic=False)
        self.arguments = self.cache.inputs(tokens)
        logits = self.run()[0]
        self.compile_s = time.perf_counter() - started
        self.some_logits = logits.flatten(0, 1)[:: max(1, batch * nodes // 128)].float()

    def restore(self) -> None:
        """Put back the states, which a verification under store_all overwrites: every policy is timed on the same ones."""
        self.cache.state.copy_(self.state)

    def run(self) -> tuple[Tensor, Any]:
        """Run the step once; nothing is committed, so that every run after :meth:`restore` finds the same cache."""
        cache = self.cache
        cache.position_ids.copy_(cache.encoding.positions(cache.lengths))
        cache.encoding.fill_mask(cache.mask, cache.lengths)
        logits = self.step(**self.arguments).logits
        return logits, greedy_accept(logits, cache.tokens, cache.encoding)


class Case:
    """One tree at one batch size, compiled for some policies."""

    def __init__(self, name: str, widths: str, batch: int, policies: Sequence[str]) -> None:
        # Every process has the same model and tokens.
        torch.manual_seed(0)
        self.model = one_period(name)
        tree = DraftTree.from_widths([int(width) for width in widths.split(",")])
        self.tokens = torch.randint(0, self.model.config.vocab_size, (batch, len(tree)), device=DEVICE)
        self.steps: dict[str, CompiledStep] = {}
        states = batch * self.model.config.linear_num_value_heads
        for policy in policies:
            # Where no token waits replay is reconstruct, compiled and run by the same code.
            is_same = policy == "replay" and default_flush_every(len(tree), states) == 1
            self.steps[policy] = self.steps["reconstruct"] if is_same else CompiledStep(self.model, self.tokens, tree, policy)
        gc.collect()
        torch.cuda.empty_cache()

    def timed(self) -> dict[str, Any]:
        """Return the milliseconds of each policy's step, and of embedding and output matrix alone."""
        steps = list(dict.fromkeys(self.steps.values()))
        times = {step: measured(step.run, step.restore) for step in steps}
        # Once more in the other order: a policy must not gain from its place in the row.
        for step in reversed(steps):
            times[step] = min(times[step], measured(step.run, step.restore), key=lambda each: each["ms"])
        found: dict[str, Any] = {policy: times[step] for policy, step in self.steps.items()}
        model = self.model
        hidden = torch.randn(*self.tokens.shape, model.config.hidden_size, device=DEVICE, dtype=torch.bfloat16)
        found["ends"] = measured(lambda: (model.model.embed_tokens(self.tokens), model.lm_head(hidden).argmax(-1)))
        layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name)
        found["parameters"] = {"period": layers, "ends": sum(p.numel() for p in model.parameters()) - layers}
        if len(self.tokens) == 1:
            found["kernels"] = {
                policy: kernels_of(capture([step.run], 1).replay, prepare=step.restore) for policy, step in self.steps.items()
            }
        found["compile_s"] = {policy: step.compile_s for policy, step in self.steps.items()}
        found["logits"] = {policy: step.some_logits.cpu().numpy() for policy, step in self.steps.items()}
        return found | {"layers": PERIOD, "machine": machine_line("bf16, fp32 state")}


def run_case(name: str, widths: str, batch: int, policies: Sequence[str], barrier: Any, turn: Any, results: Any) -> None:
    """Compile, wait for the others, then time alone; puts one row, or what went wrong, into ``results``."""
    row: dict[str, Any] = {"widths": widths, "batch": batch}
    case = None
    with torch.no_grad():
        try:
            case = Case(name, widths, batch, policies)
        except Exception:
            row["error"] = traceback.format_exc(limit=-4)[-1500:]
        # A case that died without a word must not keep the others waiting.
        row["is_alone"] = False
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(PATIENCE)
            row["is_alone"] = True
        with turn:
            if case is not None:
                try:
                    row |= case.timed()
                except Exception:
                    row["error"] = traceback.format_exc(limit=-4)[-1500:]
            del case
            gc.collect()
            torch.cuda.empty_cache()
    results.put(row)
