"""Capture a function that reads and writes tensors at fixed addresses as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

WARMUP_RUNS = 3

Result = TypeVar("Result")


def capture_graph(run: Callable[[], Result], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Return a graph of ``run`` and what it returned while it was captured: tensors that every replay overwrites.

    Args:
        run: without arguments and without waiting for the device. It runs a few times before it is captured, so what it
            reads has to make these runs harmless.
        pool: memory pool to share with other graphs, as ``torch.cuda.graph`` takes it.
    """
    # Capture must not compile, tune or allocate libraries' workspaces, so all of that happens in these runs.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_RUNS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()
    return graph, result
