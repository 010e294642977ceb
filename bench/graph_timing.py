"""Time on a GPU by replaying CUDA graphs, so that launch gaps of the host stay out, and what one read of memory costs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


class Timing(NamedTuple):
    """Microseconds a call: median, tenth and ninetieth percentile over replays."""

    median: float
    p10: float
    p90: float

    @property
    def spread(self) -> float:
        """How far the percentiles are apart, as a share of the median."""
        return (self.p90 - self.p10) / self.median

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Return the timing of ``samples`` in ascending order."""
        return cls(statistics.median(samples), samples[len(samples) // 10], samples[-1 - len(samples) // 10])


def capture(calls: Sequence[Callable[[], object]], rounds: int) -> torch.cuda.CUDAGraph:
    """Return a graph of ``rounds`` rounds over ``calls``, each of which has run once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
    torch.cuda.synchronize()
    return graph


def time_calls(calls: Sequence[Callable[[], object]], *, at_least_us: float = 3000.0, replays: int = 15) -> Timing:
    """Return the time of one call; ``calls`` are the same work on other memory, so that a replay finds no warm cache.

    A graph holds as many rounds as take ``at_least_us``, so that its own start does not show.
    """
    once = capture(calls, 1)
    once.replay()
    samples = sorted_us(once.replay, 3)
    rounds = max(1, min(200, round(at_least_us / max(samples[1], 1.0))))
    graph = once if rounds == 1 else capture(calls, rounds)
    graph.replay()
    return Timing.of([us / (rounds * len(calls)) for us in sorted_us(graph.replay, replays)])


def kernels_of(
    run: Callable[[], object], runs: int = 10, prepare: Callable[[], object] = lambda: None
) -> dict[str, tuple[float, float]]:
    """Return for each kernel, by name, the microseconds of all its launches in a run, and how many there are.

    Those of ``prepare``, which runs before each, are among them.
    """
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(runs):
            prepare()
            run()
        torch.cuda.synchronize()
    us: dict[str, float] = defaultdict(float)
    launches: dict[str, float] = defaultdict(float)
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            us[event.name] += event.time_range.elapsed_us() / runs
            launches[event.name] += 1 / runs
    return {name: (round(us[name], 2), launches[name]) for name in us}


def samples_us(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the microseconds of each of ``repeats`` calls, between two events and waiting for each."""
    samples = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3)
    return samples


def sorted_us(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the microseconds of each of ``repeats`` calls, least first."""
    return sorted(samples_us(call, repeats))


@triton.jit
def _read_kernel(
    memory,  # [size] float32
    sink,  # [1] float32, never written: no sum of finite numbers is NaN
    size,
    BLOCK: tl.constexpr,
):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(memory + offset, mask=offset < size, other=0.0), 0)
    tl.store(sink, total, mask=total != total)


def time_read(memories: Sequence[Tensor]) -> Timing:
    """Return the time of reading one of the contiguous float32 tensors ``memories`` once: the best of three block sizes."""
    sink = torch.zeros(1, device="cuda")

    def read(memory: Tensor, block: int, warps: int) -> Callable[[], object]:
        flat = memory.view(-1)
        grid = (triton.cdiv(flat.numel(), block),)
        return lambda: _read_kernel[grid](flat, sink, flat.numel(), block, num_warps=warps)

    return min(time_calls([read(m, block, warps) for m in memories]) for block, warps in ((4096, 4), (8192, 8), (16384, 8)))


def time_copy(memories: Sequence[Tensor]) -> Timing:
    """Return the time of one read plus one write of a tensor like those in ``memories``."""
    target = torch.empty_like(memories[0])
    return time_calls([lambda memory=memory: target.copy_(memory) for memory in memories])
