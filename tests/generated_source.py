"""What Inductor would write for a GPU that is not here: the wrapper's source, generated on a CPU build and never run.

Inductor asks torch.cuda and Triton's driver which GPU there is; while :func:`source_for` runs, the answers are an H200's. What
is replaced belongs to torch 2.13: on a version that asks elsewhere the caller skips.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
    is_integrated=False,
)


class _Written(Exception):
    """Ends a compile once its source is known."""


def _forget_devices() -> None:
    """Empty the caches that remember whether there is a GPU."""
    import torch.utils._triton
    from torch._inductor.runtime.hints import DeviceProperties

    DeviceProperties.create.cache_clear()
    for value in vars(torch.utils._triton).values():
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()


@contextlib.contextmanager
def _one_h200() -> Iterator[None]:
    import triton.runtime
    from torch._dynamo import device_interface
    from triton.backends.compiler import GPUTarget

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        is_active=lambda: True,
    )
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: H200,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: H200.name,
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda *_: None,
        "_exchange_device": lambda *_: 0,
        "_maybe_exchange_device": lambda *_: 0,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }
    interface = device_interface.CudaInterface
    with contextlib.ExitStack() as replaced:
        for name, answer in answers.items():
            replaced.enter_context(mock.patch.object(torch.cuda, name, answer))
            if name in ("is_available", "device_count", "current_device", "get_device_properties", "synchronize"):
                replaced.enter_context(mock.patch.object(interface, name, staticmethod(answer)))
        replaced.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        replaced.enter_context(mock.patch.dict(device_interface.caching_worker_device_properties, {"cuda": [H200]}))
        replaced.enter_context(mock.patch.dict(device_interface.caching_worker_current_devices, {"cuda": 0}))
        # These passes allocate on the device when they are first used, and where an earlier compile of the process has used them,
        # padding a product is still decided by timing it: shape_padding below.
        for stage in ("joint_graph", "post_grad"):
            replaced.enter_context(mock.patch(f"torch._inductor.fx_passes.{stage}.lazy_init", lambda *_, **__: None))
        # The method, unlike the op, asks for a guard of the device, which a CPU build has not.
        copy = torch.ops.aten.copy_.default
        replaced.enter_context(mock.patch.object(torch.Tensor, "copy_", lambda to, source, *_, **__: copy(to, source)))
        active = property(lambda _: driver)
        replaced.enter_context(mock.patch.object(type(triton.runtime.driver), "active", active))
        replaced.enter_context(
            torch._inductor.config.patch(
                force_disable_caches=True, compile_threads=1, joint_graph_constant_folding=False, shape_padding=False
            )
        )
        torch._C._ensureCUDADeviceGuardSet()
        _forget_devices()
        try:
            yield
        finally:
            _forget_devices()


def source_for(function: Callable[..., Any], make_arguments: Callable[[], tuple[Any, ...]]) -> tuple[str, set[str]]:
    """Return what Inductor writes for ``function`` and which inputs it takes for overwritten.

    Args:
        make_arguments: makes the function's tensors on "cuda", none of which is real.
    """
    from torch._inductor.graph import GraphLowering

    written: list[tuple[str, set[str]]] = []

    def keep(graph: Any) -> None:
        written.append((graph.codegen()[0].value, set(graph.mutated_inputs)))
        raise _Written

    torch._dynamo.reset()
    with _one_h200(), mock.patch.object(GraphLowering, "compile_to_module", keep), FakeTensorMode(), torch.no_grad():
        try:
            torch.compile(function, fullgraph=True, dynamic=False)(*make_arguments())
        except Exception:
            if not written:
                raise
    torch._dynamo.reset()
    return written[0]
