"""The two sides of bench.step: our whole step in one CUDA graph, and stock compiled decoding of one token.

Both take Qwen3.5 shapes with seeded random bf16 weights, hold a prompt of ``PROMPT`` tokens in each row, and offer the same:
``compile_s``; ``run``, a step as a host calls it; ``graphs``, what the device replays in it; ``rewind``, back to the prompt.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig, StaticCache

from treewy_inductor.backend import treewy
from treewy_inductor.captured_step import CapturedStep
from treewy_inductor.models.transformers_api import CACHE_KEYWORD
from treewy_inductor.models.tree_cache import TreeCache
from treewy_inductor.tree import INERT, ROOT, DraftTree

WIDTHS = (3, 3, 3)
PROMPT = 1024
CHECKED_NODES = (0, 1, 13, 39)
# The published config.json of each size.
SIZES: dict[str, dict[str, int]] = {
    "0.8B": {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 3584, "num_attention_heads": 8}
    | {"num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 16},
    "4B": {"hidden_size": 2560, "num_hidden_layers": 32, "intermediate_size": 9216, "num_attention_heads": 16}
    | {"num_key_value_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
}
COMMON = {"vocab_size": 248320, "head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
COMMON |= {"linear_conv_kernel_dim": 4, "tie_word_embeddings": True, "max_position_embeddings": 65536}


def random_model(size: str, device: str, attention: str = "treewy") -> Qwen3_5ForCausalLM:
    """Return a bf16 model of that size's shapes, in evaluation mode, with seeded random weights."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**COMMON | SIZES[size], dtype="bfloat16", attn_implementation=attention)
    before = torch.get_default_dtype()
    # Parameters made in float32 first would take three times the memory, which other processes need.
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen3_5ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def random_trees(rows: int, nodes: int, rng: random.Random) -> torch.Tensor:
    """Return parents ``[rows, nodes]`` int32: in each row a random tree of a random size, the rest inert."""
    parents = torch.full((rows, nodes), INERT, dtype=torch.int32)
    for row in range(rows):
        for t in range(rng.randint(1, nodes)):
            parents[row, t] = rng.randrange(t) if t else ROOT
    return parents


class Ours:
    """The captured step on a cache that holds the prompt, its errors, and what other trees do to it.

    Args:
        outline: what the backend's ``treewy.outline`` is set to, None for its default.
    """

    def __init__(self, model: Qwen3_5ForCausalLM, prompt: torch.Tensor, max_length: int, outline: bool | None) -> None:
        self.model, self.prompt = model, prompt
        self.tree = DraftTree.from_widths(WIDTHS)
        self.cache = TreeCache(model.config, prompt.shape[0], max_length, len(self.tree), device=prompt.device)
        self.cache.prefill(model, prompt)
        self.start = self.cache.snapshot()
        torch._dynamo.utils.counters.clear()
        started = time.perf_counter()
        self.cache.set_tree(self.tree)
        torch.cuda.synchronize()
        self.tree_compile_s = time.perf_counter() - started
        options: dict[str, Any] = {} if outline is None else {"treewy.outline": outline}
        self.compiled = torch.compile(model, backend=treewy, fullgraph=True, dynamic=False, options=options)
        self.step = CapturedStep(self.compiled, self.cache)
        self.compile_s = time.perf_counter() - started
        self.tokens = torch.randint(0, model.config.vocab_size, (prompt.shape[0], len(self.tree)), device=prompt.device)

    def errors(self, stock: Qwen3_5ForCausalLM) -> tuple[float, float]:
        """Return the worst error of the step's and of plain eager bf16's logits against float32, over some paths of row 0."""
        self.rewind()
        self.run()
        logits = self.step.logits[0].float().clone()
        self.rewind()
        wide = copy.deepcopy(stock).float()
        ours, eager = [], []
        for node in CHECKED_NODES:
            path = self.tree.path_to(node)
            exact, plain = (self._along(model, path) for model in (wide, stock))
            ours.append(float((logits[node] - exact).norm() / exact.norm()))
            eager.append(float((plain - exact).norm() / exact.norm()))
        return max(ours), max(eager)

    def _along(self, model: Qwen3_5ForCausalLM, path: list[int]) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=self.prompt[:1], use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: cache})
            return model(input_ids=self.tokens[:1, path], use_cache=True, **{CACHE_KEYWORD: cache}).logits[0, -1].float()

    def replayed(self, trees: int = 100, compared: int = 25) -> dict[str, Any]:
        """Run random trees through the graph; tell what was compiled or captured again and whether a fresh graph does the same.

        Every ``compared`` trees the rows start at the prompt again; the last ones run in a graph captured anew, too.
        """
        rng, vocabulary = random.Random(0), self.model.config.vocab_size
        cases = []
        for _ in range(trees):
            parents = random_trees(self.tokens.shape[0], self.tokens.shape[1], rng)
            cases.append((parents, torch.randint(0, vocabulary, self.tokens.shape, device=self.tokens.device)))
        graphs = compiled_graphs()
        told: list[list[torch.Tensor]] = []
        for i, case in enumerate(cases):
            if i % compared == 0:
                self.rewind()
                told.clear()
            told.append([x.clone() for x in (*self.step(*case), self.step.logits)])
        held = self._held()
        again = self.step.captures - 1
        fresh = CapturedStep(self.compiled, self.cache)
        self.rewind()
        same = True
        for case, before in zip(cases[-compared:], told, strict=True):
            after = (*fresh(*case), fresh.logits)
            same = same and all(torch.equal(_bits(a), _bits(b)) for a, b in zip(after, before, strict=True))
        same = same and all(torch.equal(_bits(a), _bits(b)) for a, b in zip(self._held(), held, strict=True))
        compiled = compiled_graphs() - graphs
        return {"trees": trees, "recompiles": compiled, "recaptures": again, "bit_identical": same}

    def _held(self) -> list[torch.Tensor]:
        cache = self.cache
        inside = torch.arange(cache.max_length, device=cache.device) < cache.lengths[:, None]
        rows = (torch.where(inside[None, :, None, :, None], x, 0) for x in (cache.keys, cache.values))
        return [x.clone() for x in (cache.states.state, cache.history, *rows, cache.lengths)]

    def rewind(self) -> None:
        """Make every row hold its prompt again, nothing more."""
        self.cache.restore(self.start)

    def run(self) -> None:
        """One step; repeats start at nearly the same length, since random drafts are rejected."""
        self.step(self.tree, self.tokens)

    def run_uncaptured(self) -> None:
        """The same work launched kernel by kernel."""
        self.step.run_uncaptured()

    def graphs(self) -> Sequence[torch.cuda.CUDAGraph]:
        """Return the one graph."""
        return [self.step._graph]


def _bits(x: torch.Tensor) -> torch.Tensor:
    # What an inert node's logits are is nobody's business, but they are the same bits, NaN or not.
    return x.contiguous().view(torch.uint8)


class Decode:
    """Stock compiled decoding of one token."""

    def __init__(self, model: Qwen3_5ForCausalLM, prompt: torch.Tensor, max_length: int) -> None:
        self.cache = StaticCache(config=model.config, max_cache_len=max_length)
        with torch.no_grad():
            model(input_ids=prompt, use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: self.cache})
        self.token = torch.ones(prompt.shape[0], 1, dtype=torch.int64, device=prompt.device)
        self.position = torch.full_like(self.token, prompt.shape[1])
        started = time.perf_counter()
        self.step = torch.compile(model, mode="reduce-overhead", dynamic=False)
        for _ in range(3):
            self.run()
        torch.cuda.synchronize()
        self.compile_s = time.perf_counter() - started

    def rewind(self) -> None:
        """Make every row hold its prompt again: each token moves the counters of the softmax layers on."""
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(int(self.position[0, 0]))

    def run(self) -> None:
        """One token, at the same position each time."""
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            inputs = {"input_ids": self.token, "position_ids": self.position, "use_cache": True}
            self.step(**inputs, **{CACHE_KEYWORD: self.cache}).logits.argmax(-1)

    def graphs(self) -> Sequence[torch.cuda.CUDAGraph]:
        """Return what Inductor recorded of a token, in the order of replay; the choice of the next token is none of it."""
        self.run()
        manager = torch._inductor.cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        node = None if manager is None else manager.current_node
        recorded: list[torch.cuda.CUDAGraph] = []
        while isinstance(node, torch._inductor.cudagraph_trees.CUDAGraphNode):
            recorded += [] if node.graph is None else [node.graph]
            node = node.parent
        return recorded[::-1]


def compiled_graphs() -> int:
    """Return how many graphs Dynamo has compiled in this process since its counters were cleared."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
