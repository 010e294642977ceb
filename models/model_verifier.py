"""A model of transformers with a TreeCache as the verifier of the decoding loop.

The model is compiled once for each set of sizes and options and the compiled step is kept as long as the model lives; so is
the last cache, whose buffers a CUDA graph has recorded.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treewy_inductor.backend import split_options, treewy
from treewy_inductor.captured_decoding import CapturedDecoding, CapturedVerification
from treewy_inductor.models.prefill import check_same_layers
from treewy_inductor.models.transformers_api import uncompiled
from treewy_inductor.models.tree_cache import TreeCache
from treewy_inductor.step_decisions import Decision
from treewy_inductor.tree import DraftTree

_steps: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[Any, ...], Callable[..., Any]]] = weakref.WeakKeyDictionary()
_idle_cache: weakref.WeakKeyDictionary[PreTrainedModel, TreeCache] = weakref.WeakKeyDictionary()
_graphs: weakref.WeakKeyDictionary[TreeCache, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
# Each holds logits of all nodes: the least recently captured makes room.
MOST_GRAPHS = 6


def _verify(model: PreTrainedModel, inputs: dict[str, Any], with_hidden: bool) -> tuple[Tensor, Tensor | None]:
    output = model(**inputs, output_hidden_states=with_hidden)
    return output.logits, output.hidden_states[-1] if with_hidden else None


def compiled_step(model: PreTrainedModel, cache: TreeCache, with_hidden: bool, options: dict[str, Any]) -> Callable[..., Any]:
    """Return ``(model, inputs, with_hidden) -> (logits, hidden states)``, compiled for the sizes of ``cache``.

    The step takes the model as an argument, so that keeping the step does not keep the model.

    Args:
        options: of ``torch.compile``: ``mode`` or ``options``.
    """
    sizes = (cache.rows, cache.max_nodes, cache.max_length, cache.dtype, str(cache.device))
    key = (*sizes, with_hidden, model.config._attn_implementation, repr(sorted(options.items())))
    steps = _steps.setdefault(model, {})
    if key not in steps:
        # Dynamo counts recompiles per code object and gives up after eight; each set of sizes has an object of its own.
        own = types.FunctionType(_verify.__code__.replace(), _verify.__globals__, _verify.__name__)
        steps[key] = torch.compile(own, backend=treewy, fullgraph=True, dynamic=False, **options)
    return steps[key]


def compiled_steps(model: torch.nn.Module) -> int:
    """Return how many steps were compiled for ``model``."""
    return len(_steps.get(uncompiled(model), {}))


def _check_options(options: Any) -> None:
    # Asked here, since what a backend raises comes wrapped in a report of the compiler.
    if not isinstance(options, dict) or not set(options) <= {"mode", "options"}:
        raise ValueError(f"compile_options is {options!r}, expected a dictionary with torch.compile's mode, options or both")
    split_options(options.get("mode"), options.get("options"))


@contextlib.contextmanager
def borrowed_cache(model: PreTrainedModel, rows: int, length: int, max_nodes: int) -> Iterator[TreeCache]:
    """Give an empty TreeCache with room for ``length`` tokens: the one of the last time if it fits, a new one otherwise."""
    # Sizes in powers of two, so that texts of other lengths find the same compiled step.
    max_length = max(256, 1 << (length + max_nodes - 1).bit_length())
    # While it is lent it is not in the dictionary, so that another thread gets a cache of its own.
    cache = _idle_cache.pop(model, None)
    wanted = (rows, max_length, max_nodes, model.dtype, model.device)
    if cache is None or (cache.rows, cache.max_length, cache.max_nodes, cache.dtype, cache.device) != wanted:
        cache = TreeCache(model.config, rows, max_length, max_nodes, dtype=model.dtype, device=model.device)
    cache.reset()
    cache.bound_lengths()
    yield cache
    _idle_cache[model] = cache


def can_capture(cache: TreeCache, options: dict[str, Any]) -> bool:
    """Return whether the step compiled with ``options`` can be held by a CUDA graph: it generates code and makes no graph."""
    own = options.get("options") or {}
    makes_graphs = options.get("mode") in ("reduce-overhead", "max-autotune") or own.get("triton.cudagraphs", False)
    return cache.device.type == "cuda" and not makes_graphs and own.get("treewy.codegen", True)


class ModelVerifier:
    """See :class:`treewy_inductor.decoding.Verifier`.

    On a CUDA device verifications, and whole steps where nothing has to be decided on the host, are replayed as CUDA graphs,
    which are kept as long as the cache.

    Args:
        model: a causal language model, eager or compiled; its module is compiled here.
        cache: whose rows may hold tokens already.
        with_hidden: whether hidden states are wanted.
        options: of ``torch.compile``.
        cuda_graph: whether to capture; by default wherever it is possible.

    Raises:
        ValueError: if capturing was asked for and is not possible, an option of the compiler is unknown, or the cache is of
            another model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: TreeCache,
        with_hidden: bool = False,
        options: dict[str, Any] | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        self.model, self.cache, self.with_hidden = uncompiled(model), cache, with_hidden
        self.rows, self.max_nodes, self.device = cache.rows, cache.max_nodes, cache.device
        self.vocab_size = self.model.config.get_text_config(decoder=True).vocab_size
        self.encoding = cache.encoding
        check_same_layers(cache, self.model)
        _check_options(options or {})
        self._step = compiled_step(self.model, cache, with_hidden, options or {})
        self._captures = can_capture(cache, options or {}) if cuda_graph is None else cuda_graph
        if self._captures and not can_capture(cache, options or {}):
            raise ValueError(
                f"cuda_graph is True on {cache.device} with compile_options {options}: it needs a CUDA device, generated code "
                "and no mode that makes CUDA graphs itself"
            )
        # A graph reads the weights where they lay when it was captured.
        addresses = tuple(tensor.data_ptr() for tensor in (*self.model.parameters(), *self.model.buffers()))
        self._key = (with_hidden, repr(sorted((options or {}).items())), addresses)

    def prefill(self, prompts: dict[int, list[int]]) -> dict[int, Tensor]:
        rows = sorted(prompts)
        longest = max(map(len, prompts.values()))
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(prompts[row])] = torch.tensor(prompts[row])
            mask[i, : len(prompts[row])] = 1
        result = self.cache.prefill(
            self.model,
            ids.to(self.device),
            mask.to(self.device),
            rows=rows,
            return_hidden_states=self.with_hidden,
        )
        return dict(zip(rows, result[1], strict=True)) if self.with_hidden else {}

    def verify(self, trees: Sequence[DraftTree | None], tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._captures:
            captured = self._graph("verify", lambda: CapturedVerification(self.cache, self._run, self._pool()))
            return captured(self.cache, trees, tokens)
        self.cache.set_tree(trees)
        return self._run(self.cache.inputs(tokens.to(self.device, non_blocking=True)))

    def commit(self, path: Tensor) -> None:
        self.cache.commit(path)

    def capture(
        self, decision: Decision, ends: int, drafter: Any = None, widths: tuple[int, ...] | None = None
    ) -> CapturedDecoding | None:
        """Return whole steps as one graph, or None where nothing is captured.

        Args:
            ends: how many end tokens there are.
            drafter: that can draft on the device trees of ``widths``, or None where the host gives trees.
        """
        if not self._captures:
            return None
        room_for_ends = 1 << max(0, ends - 1).bit_length()
        places = self.cache.max_length + self.max_nodes

        def make() -> CapturedDecoding:
            drafting = None if drafter is None else drafter.captured(self.rows, places, widths)
            return CapturedDecoding(self.cache, self._run, decision, room_for_ends, drafting, self._pool())

        return self._graph((decision.key, room_for_ends, drafter and (drafter.capture_key, widths)), make)

    def _run(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            return self._step(self.model, inputs, self.with_hidden)

    def _graph(self, kind: Hashable, make: Callable[[], Any]) -> Any:
        graphs = _graphs.setdefault(self.cache, {})
        key = (*self._key, kind)
        if key not in graphs:
            while len(graphs) >= MOST_GRAPHS:
                del graphs[next(iter(graphs))]
            graphs[key] = make()
        return graphs[key]

    def _pool(self) -> Any:
        """Return the memory pool that the graphs of one cache share, since only one of them runs at a time."""
        return next((graph.pool for graph in _graphs.get(self.cache, {}).values()), None)
