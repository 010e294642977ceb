"""Each private API of torch that the package touches, one function per difference between versions.

Features are probed, never version strings. What was read: torch 2.11, 2.13, 2.14 and 2.15.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["INVOKE_SUBGRAPH", "CustomGraphPass"]


def compile_with_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any], region_name: str | None, op_by_op: bool
) -> Callable[..., Any]:
    """Compile a Dynamo graph as ``backend="inductor"`` does, with ``options`` patched into its configuration.

    Args:
        region_name: what torch 2.15 calls ``torch.compile(name=)``; earlier versions never give one.
        op_by_op: stop after the joint passes and run the graph that they leave op by op.
    """
    from torch._inductor.compile_fx import compile_fx

    extra: dict[str, Any] = {}
    if region_name is not None and "compile_region_name" in inspect.signature(compile_fx).parameters:
        extra["compile_region_name"] = region_name
    if op_by_op:
        extra["inner_compile"] = _run_op_by_op
    return compile_fx(module, inputs, config_patches=options, **extra)  # type: ignore[return-value]


def _run_op_by_op(module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[[list[Any]], Any]:
    module.recompile()

    def run(args: list[Any]) -> Any:
        taken = list(args)
        args.clear()
        return module(*taken)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def mode_options(mode: str | None) -> dict[str, Any]:
    """Expand ``torch.compile(mode=)`` into Inductor options."""
    if not mode or mode == "default":
        return {}
    return dict(torch._inductor.list_mode_options(mode))


def known_option(key: str) -> bool:
    """Whether Inductor has a configuration of this name; aliases count, which its own list leaves out."""
    from torch._inductor import config

    here: Any = config
    for part in key.split("."):
        if not hasattr(here, part):
            return False
        here = getattr(here, part)
    return True


def option_now(key: str) -> Any:
    """Return the value that Inductor's configuration has for a key such as ``joint_custom_pre_pass``."""
    from torch._inductor import config

    here: Any = config
    for part in key.split("."):
        here = getattr(here, part)
    return here


def keep_profiler_with_cudagraphs() -> None:
    """Do what the stock backend does for CUDA graphs so that a profiler may be attached again."""
    import os

    from torch.torch_version import TorchVersion

    version = getattr(torch.version, "cuda", None)
    is_lazy = getattr(torch, "profiler_allow_cudagraph_cupti_lazy_reinit_cuda12", None)
    if version and (TorchVersion(version) < "12.6" or (is_lazy is not None and not is_lazy())):
        os.environ["DISABLE_CUPTI_LAZY_REINIT"] = "1"
        os.environ["TEARDOWN_CUPTI"] = "0"


def reset_cudagraphs() -> None:
    """Forget what CUDA graphs Inductor recorded, as the stock backend's reset does."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


def never_record_gradients(module: fx.GraphModule) -> None:
    """Take out of a Dynamo graph what switches gradients on and off: a model's own no_grad would switch them on behind it."""
    for node in module.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled):
        module.graph.erase_node(node)
    module.recompile()


def error_of_dynamo() -> type[Exception]:
    """Return the base of errors that Dynamo hands on as they are, with few lines of its own above them."""
    from torch._dynamo.exc import ShortenTraceback

    return ShortenTraceback


def without_fake_tensors() -> AbstractContextManager[Any]:
    """Let operators run on real tensors while a compile is going on."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def fake_mode_of(value: Any) -> AbstractContextManager[Any] | None:
    """Return the fake tensor mode that a node's value belongs to, none if it is a real tensor."""
    return getattr(value, "fake_mode", None)


def sort_nodes(graph: fx.Graph) -> None:
    """Order nodes so that each stands after its inputs, changing the order as little as that needs."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def functional_call(op: Any, arguments: dict[str, Any], mutated: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return target, args and kwargs of a functional call of an op that mutates, as functionalization would have traced it.

    It returns the op's results and then the new contents of each mutated tensor; Inductor makes it a mutation again.

    Args:
        mutated: the tensors that the op overwrites, by name; none a view.
    """
    from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

    bases = {f"_{name}_base_index": index for index, name in enumerate(mutated)}
    return auto_functionalized_v2, (op,), {**arguments, **bases, "_all_bases": list(mutated.values())}


INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph


def add_subgraph(graph: fx.Graph, prefix: str, subgraph: fx.GraphModule) -> str:
    """Put a subgraph into the module that a graph belongs to, for ``INVOKE_SUBGRAPH`` to call; return its name there."""
    module = graph.owning_module
    number = 0
    while hasattr(module, f"{prefix}_{number}"):
        number += 1
    setattr(module, f"{prefix}_{number}", subgraph)
    return f"{prefix}_{number}"


def generates_python(options: dict[str, Any]) -> bool:
    """Whether Inductor calls kernels from Python, the only wrapper that can call a subgraph."""
    now = {key: options.get(key, option_now(key)) for key in ("cpp_wrapper", "fx_wrapper") if known_option(key)}
    return not any(now.values())


def is_exporting() -> bool:
    """Whether torch.export is running, also when Dynamo traces this call, where torch 2.11 always says so itself."""
    return torch.compiler._is_exporting_flag


def write_artifact(name: str, payload: Callable[[], str], encoding: str = "string") -> None:
    """Put a text beside Inductor's own in the trace that ``TORCH_TRACE`` asks for and ``tlparse`` shows."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)


def realize_strided(node: Any, contiguous: Sequence[int]) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """Return an Inductor value as a buffer or a view of one, its sizes and its strides, which then no longer change.

    Args:
        contiguous: dimensions of which one must have stride 1, else the value is copied; empty if any layout will do.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    sizevars = V.graph.sizevars
    # What torch 2.13 calls guard_int.
    static = getattr(sizevars, "guard_int", None) or sizevars.evaluate_static_shape  # type: ignore[attr-defined]

    def realized(value: Any) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
        value = ir.ExternKernel.realize_input(value)
        layout = ir.as_storage_and_layout(value, freeze=True)[1]
        sizes, strides = (tuple(map(static, which)) for which in (layout.size, layout.stride))
        return ir.TensorBox(value), sizes, strides

    if contiguous:
        _lay_out_as_traced(node)
    described = realized(node)
    if contiguous and all(described[2][dim] != 1 and described[1][dim] != 1 for dim in contiguous):
        return realized(ir.ExternKernel.require_contiguous(described[0]))
    return described


def _lay_out_as_traced(node: Any) -> None:
    """Let the buffer under a view have the order of strides that it had in the graph, if Inductor has not chosen one yet.

    Its own choice is that of the sizes: what was computed transposed would have to be copied by whoever reads it untransposed.
    """
    from torch._inductor import ir

    value = node.data if isinstance(node, ir.TensorBox) else node
    base = value.unwrap_view() if isinstance(value, ir.BaseView) else value
    if not isinstance(base, ir.StorageBox):
        return
    base.realize()
    buffer = base.data
    if not isinstance(buffer, ir.Buffer) or not isinstance(buffer.layout, ir.FlexibleLayout):
        return
    origin = buffer.get_origin_node()
    traced = None if origin is None else origin.meta.get("val")
    if isinstance(traced, torch.Tensor) and list(traced.shape) == list(buffer.get_size()):
        buffer.freeze_layout_with_same_order(list(traced.stride()))


def empty_buffer(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Allocate a contiguous tensor in the graph that Inductor is lowering."""
    from torch._inductor.lowering import empty_strided

    return empty_strided(list(sizes), None, dtype=dtype, device=device)


def destinations(results: int) -> list[Any]:
    """Return, for each result of the op that Inductor is lowering, the graph input that it may be written into, or None.

    That is an input, laid out as the result is, which the graph does nothing with but copy the result into it. A lowering that
    returns this very value for the result leaves the copy nothing to do, which Inductor knows by identity.
    """
    import operator

    from torch._inductor.virtualized import V

    found: list[Any] = [None] * results
    node = V.current_node
    if not isinstance(node, fx.Node):
        return found
    for result in node.users:
        if result.target is not operator.getitem:
            continue
        copies = [user for user in result.users if user.target is torch.ops.aten.copy_.default and user.args[1] is result]
        if len(copies) != 1:
            continue
        buffer = copies[0].args[0]
        if not isinstance(buffer, fx.Node) or buffer.op != "placeholder" or list(buffer.users) != copies:
            continue
        theirs, ours = buffer.meta["val"], result.meta["val"]
        is_like = (theirs.shape, theirs.dtype, theirs.device) == (ours.shape, ours.dtype, ours.device)
        if is_like and (theirs.stride() == ours.stride() or (theirs.is_contiguous() and ours.is_contiguous())):
            found[int(str(result.args[1]))] = V.graph.env[buffer]
    return found


def emit_kernel(kernel: Any, grid: int, tensors: dict[str, Any], constants: dict[str, Any], warps: int, stages: int) -> None:
    """Write a launch of a ``@triton.jit`` kernel into the graph that Inductor is lowering.

    Called through the lowering of Dynamo's own wrapper of user kernels, whose signature has not changed, rather than through
    the IR node, whose has.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
    from torch._inductor.lowering import lowerings

    dtypes = tuple((name, tensor.get_dtype()) for name, tensor in tensors.items())
    with _analyzed_once((kernel, dtypes, tuple(constants.items()))):
        lowerings[triton_kernel_wrapper_mutation](
            kernel_idx=kernel_side_table.add_kernel(_with_one_configuration(kernel, warps, stages)),
            constant_args_idx=kernel_side_table.add_constant_args(constants),
            grid=[(grid, 1, 1)],
            tma_descriptor_metadata={},
            kwargs=tensors,
        )


_accesses: dict[Any, Any] = {}


@contextmanager
def _analyzed_once(key: Any) -> Iterator[None]:
    """Let Inductor find out what a kernel writes once for all launches that are alike, not anew for each layer.

    It hands the whole kernel to Triton's compiler for that: 0.4 s a layer, most of the time of lowering a model.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    # The earlier name is torch 2.11's.
    name = next(n for n in ("identify_mutated_tensors", "identify_accessed_tensors") if hasattr(triton_kernel_wrap, n))
    analyze = getattr(triton_kernel_wrap, name)

    def recalled(*args: Any, **kwargs: Any) -> Any:
        if key not in _accesses:
            _accesses[key] = analyze(*args, **kwargs)
        return _accesses[key]

    setattr(triton_kernel_wrap, name, recalled)
    try:
        yield
    finally:
        setattr(triton_kernel_wrap, name, analyze)


@functools.cache
def _with_one_configuration(kernel: Any, warps: int, stages: int) -> Any:
    import triton

    # Inductor reads warps and stages from an autotuner's configurations alone; with one there is nothing to tune.
    return triton.autotune([triton.Config({}, num_warps=warps, num_stages=stages)], key=[])(kernel)


def register_lowering(op: Any, lower: Callable[..., Any]) -> None:
    """Let Inductor lower ``op`` by calling ``lower`` with its own values."""
    from torch._inductor import lowering

    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def call_in_graph(op: Any) -> Callable[..., Any]:
    """Return a lowering that leaves ``op`` a call of its eager kernel."""
    from torch._inductor.lowering import fallback_handler

    return fallback_handler(op, add_to_fallback_set=False)  # type: ignore[no-any-return]


def pointwise_in_graph(like: Any, dtype: torch.dtype, sizes: Sequence[int], element: Callable[[Any, Any], Any]) -> Any:
    """Write an elementwise loop over ``sizes`` into the graph that Inductor is lowering; it fuses with its neighbours.

    Args:
        like: an Inductor value on the device to compute on.
        element: computes one element from Inductor's operators and the element's index, one number for each axis.
    """
    from torch._inductor.ir import Pointwise
    from torch._inductor.virtualized import ops

    def inner(index: Any) -> Any:
        return element(ops, index)

    return Pointwise.create(device=like.get_device(), dtype=dtype, inner_fn=inner, ranges=list(sizes))


def permute_in_graph(value: Any, order: Sequence[int]) -> Any:
    """Permute the axes of an Inductor value without moving it."""
    from torch._inductor.lowering import lowerings

    return lowerings[torch.ops.aten.permute.default](value, list(order))
