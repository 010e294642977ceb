"""``torch.compile(model, backend="treewy")``: Inductor, with draft trees proven and rewritten first.

    before    state_in, the model's own recurrence over a chain, state_out
    after     tree_gated_delta, and no marker

Everything else is Inductor's: modes, options, caches, CUDA graphs. A graph without markers of a TreeCache and a training
graph are left exactly as stock Inductor has them; a graph with markers that cannot be proven raises
:class:`~treewy_inductor.errors.UnprovenRecurrence` while compiling.

Own options, beside Inductor's in ``options=``:
    treewy.codegen   (True)  False: no code is generated, the rewritten graph runs op by op
    treewy.check     (False) True: each rewritten layer is run against the model's own rule along paths of a random tree
    treewy.outline   (unset) equal layers become one subgraph that Inductor compiles once: True or False; unset, on a CPU,
                     since on a GPU it is a quarter less to compile and 2% more to run
"""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from treewy_inductor import compat, ops, records
from treewy_inductor.errors import UnprovenRecurrence

log = logging.getLogger(__name__)

PREFIX = "treewy."
OWN_OPTIONS: dict[str, bool | None] = {"codegen": True, "check": False, "outline": None}
SLOT = "joint_custom_pre_pass"


def treewy(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured.

    Args:
        module: the captured graph.
        example_inputs: its inputs, fake or real.
        mode: as ``torch.compile`` has it: ``"reduce-overhead"``, ``"max-autotune"``, ``"max-autotune-no-cudagraphs"``.
        options: Inductor's options, and ours under ``treewy.``.

    Raises:
        UnprovenRecurrence: the graph reads a TreeCache and holds a recurrence that could not be proven.
        ValueError: an unknown option.
    """
    own, inductor = split_options(mode, options)
    if own["outline"] is None and not (own["codegen"] and compat.generates_python(inductor)):
        own["outline"] = False
    inductor[SLOT] = TreePass(own, inductor.get(SLOT, compat.option_now(SLOT)))
    if records.is_collecting():
        inductor["force_disable_caches"] = True
    if inductor.get("triton.cudagraphs"):
        compat.keep_profiler_with_cudagraphs()
    _register_lowerings()
    # What a draft tree leaves in the cache has no gradient, so a graph that fills it is compiled for inference in any mode.
    is_tree = any(_is_marker(node) for node in module.graph.nodes)
    if is_tree:
        compat.never_record_gradients(module)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_tree), _collecting_later(is_tree):
        return compat.compile_with_inductor(module, example_inputs, inductor, kwargs.get("name"), not own["codegen"])


@contextmanager
def _collecting_later(is_tree: bool) -> Iterator[None]:
    # A model's graph is hundreds of thousands of objects that all live until it is compiled: looking through them for garbage
    # again and again took a tenth of the tracing and freed 6% of the memory.
    pause = is_tree and gc.isenabled()
    if pause:
        gc.disable()
    try:
        yield
    finally:
        if pause:
            gc.enable()


def _reset() -> None:
    compat.reset_cudagraphs()


treewy.reset = _reset  # type: ignore[attr-defined]


class TreePass(compat.CustomGraphPass):  # type: ignore[misc]
    """All passes of the package as the one that Inductor runs, after whatever pass the user had there."""

    def __init__(self, own: dict[str, Any], previous: Any) -> None:
        self.own = own
        self.previous = [] if previous is None else list(previous) if isinstance(previous, list | tuple) else [previous]

    def __call__(self, graph: fx.Graph) -> None:
        for earlier in self.previous:
            earlier(graph)
        from treewy_inductor.passes import call_copies, join_conv_silu, join_narrow_products, outline_layers

        if any(_is_marker(node) for node in graph.nodes):
            _rewrite(graph, check=self.own["check"])
            on_cpu = _is_on_cpu(graph)
            if not on_cpu:
                joined = join_conv_silu(graph), join_narrow_products(graph)
                log.debug("join_conv_silu: %d, join_narrow_products: %d", *joined)
            if self.own["outline"] or (self.own["outline"] is None and on_cpu):
                calls = outline_layers(graph)
                log.debug("outline_layers: %d calls", calls)
                if on_cpu:
                    copied = call_copies(graph)
                    log.debug("call_copies: %d calls", copied)

    def uuid(self) -> Any:
        """Return what a compiled graph depends on beside the graph: every source of the package, and options.

        None, which turns Inductor's cache off, if an earlier pass of the user's does not say what it depends on.
        """
        earlier = [getattr(each, "uuid", lambda: None)() for each in self.previous]
        if any(each is None for each in earlier):
            return None
        return "treewy", torch.__version__, _hash_of_package(), tuple(sorted(self.own.items())), tuple(earlier)


def _rewrite(graph: fx.Graph, check: bool) -> None:
    from treewy_inductor.passes import PASSES

    compat.write_artifact("treewy_before", lambda: _readable(graph))
    with records.collect() as found:
        for rewrite in PASSES:
            count = rewrite(graph, check=check)
            log.debug("%s: %d rewrites", rewrite.__name__, count)
    refused = [record for record in found if isinstance(record, records.Refused)]
    if not refused:
        refused = [_refusal_of(node, "no pass took this marker") for node in graph.nodes if _is_marker(node)]
    if refused:
        raise UnprovenRecurrence(refused, is_dynamic=any(map(_is_number, graph.find_nodes(op="placeholder"))))
    compat.write_artifact("treewy_after", lambda: _readable(graph))


def _is_on_cpu(graph: fx.Graph) -> bool:
    values = (node.meta.get("val") for node in graph.nodes if node.op == "placeholder")
    return all(value.device.type == "cpu" for value in values if isinstance(value, torch.Tensor))


def _is_number(placeholder: fx.Node) -> bool:
    # A size or a constant of the model that dynamic=True made an input; floats come as tensors without an axis.
    value = placeholder.meta.get("val")
    return not isinstance(value, torch.Tensor) or (value.dim() == 0 and value.dtype == torch.float64)


def _is_marker(node: fx.Node) -> bool:
    from treewy_inductor.passes.marked_state import MARKERS

    return node.op == "call_function" and node.target in MARKERS


def _refusal_of(marker: fx.Node, reason: str) -> records.Refused:
    layer, slot = marker.args[-2:]
    kind = "causal_conv1d" if marker.target is ops.conv_in else "gated_delta"
    return records.refuse(kind, int(str(layer)), int(str(slot)), marker, reason)


def _readable(graph: fx.Graph) -> str:
    # A new module around the graph would become its owner, and subgraphs would be put there.
    owner = graph.owning_module
    return str(graph) if owner is None else str(owner.print_readable(print_output=False))


def split_options(mode: str | None, options: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return our options and Inductor's.

    Raises:
        ValueError: an unknown option.
    """
    own, inductor = dict[str, Any](OWN_OPTIONS), compat.mode_options(mode)
    for key, value in (options or {}).items():
        if key.startswith(PREFIX):
            name = key.removeprefix(PREFIX)
            if name not in OWN_OPTIONS or not isinstance(value, bool):
                known = ", ".join(f"{PREFIX}{each} (bool)" for each in OWN_OPTIONS)
                raise ValueError(f"option {key}={value!r} is not known: treewy has {known}")
            own[name] = value
        elif compat.known_option(key.replace("-", "_")):
            inductor[key.replace("-", "_")] = value
        else:
            raise ValueError(f"option {key} is none of Inductor's (torch._inductor.config), nor one of treewy's under {PREFIX}")
    return own, inductor


@cache
def _register_lowerings() -> None:
    from treewy_inductor.lowerings.register import register_lowerings

    register_lowerings()


@cache
def _hash_of_package() -> str:
    # Inductor's cache key knows nothing of our lowerings and kernels, so every source counts.
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    package = Path(__file__).parent
    for folder in (package, package / "passes", package / "lowerings", package / "models"):
        yield from sorted([*folder.glob("*.py"), *folder.glob("*.jinja")])
