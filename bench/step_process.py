"""A process that compiles one side of bench.step and does what it is asked, one thing after the other.

Each has caches of Inductor and Triton of its own, so that its compile is a cold one whatever runs beside it. While it is asked
nothing it waits in a read, so it takes no time from one that is being timed.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

# A host that has waited for its turn takes up to ten steps to be as fast as one that decodes all the time.
WARMUPS = 12


class Job(NamedTuple):
    """What one process compiles.

    Attributes:
        kind: "step" ours, "decode" stock, "long" ours on the longer cache, "outlined" ours with ``treewy.outline``.
        compile_times: where it leaves Dynamo's table of where its compile time went.
    """

    kind: str
    size: str
    batch: int
    max_length: int
    compile_times: Path | None = None

    def __str__(self) -> str:
        return f"{self.kind} of {self.size}, batch {self.batch}"


class StepProcess:
    """Starts the process of a job, which loads its model when it is first asked for something.

    Attributes:
        error: why it can do nothing more; empty while it can.
        found: all that it has told of itself.
    """

    def __init__(self, job: Job, threads: int) -> None:
        self.job, self.error = job, ""
        self.found: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, job))
        # Both compilers read these when they are imported, so they have to stand there when the process begins.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = self._folder.name
        os.environ["TRITON_CACHE_DIR"] = f"{self._folder.name}/triton"
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
        self._process.start()
        theirs.close()

    def ask(self, request: str, *arguments: Any) -> Any:
        """Return what the process answers to ``request``, a method of :class:`_Side`; None once it has failed."""
        if self.error:
            return None
        try:
            self._pipe.send((request, arguments))
            answer, self.error = self._pipe.recv()
        except (EOFError, OSError):
            answer, self.error = None, f"the process ended while asked to {request}"
        if isinstance(answer, dict):
            self.found |= answer
        return answer

    def close(self) -> None:
        """End the process; what it holds on the device is free afterwards."""
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
        self._folder.cleanup()


class _Side:
    """What a process can be asked for."""

    def __init__(self, job: Job) -> None:
        import torch

        from bench.whole_step import PROMPT, random_model

        self.job = job
        self.model = random_model(job.size, "cuda", "sdpa" if job.kind == "decode" else "treewy")
        self.prompt = torch.randint(0, self.model.config.vocab_size, (job.batch, PROMPT), device="cuda")

    def compile(self) -> dict[str, float]:
        """Compile and run the first step; return the seconds that took."""
        import torch

        from bench.whole_step import Decode, Ours

        job = self.job
        if job.kind == "decode":
            self.timed: Any = Decode(self.model, self.prompt, job.max_length)
        else:
            self.timed = Ours(self.model, self.prompt, job.max_length, True if job.kind == "outlined" else None)
        # What the prompt needed for a moment is room that other processes want.
        torch.cuda.empty_cache()
        if job.compile_times is not None:
            job.compile_times.write_text(str(torch._dynamo.utils.compile_times("str")))
        whole = {"compile_s": self.timed.compile_s}
        return whole if job.kind == "decode" else whole | {"tree_compile_s": self.timed.tree_compile_s}

    def check(self) -> dict[str, Any]:
        """Compare our logits with the float32 oracle's and, of a plain step, replay random trees."""
        import torch

        from bench.whole_step import random_model

        found: dict[str, Any] = {}
        found["err"], found["eager_err"] = self.timed.errors(random_model(self.job.size, "cuda", "sdpa"))
        if self.job.kind == "step":
            found["random_trees"] = self.timed.replayed()
        self.timed.rewind()
        torch.cuda.empty_cache()
        return found

    def quieten(self) -> None:
        """Leave nothing of the compile that would take time from what is measured: its processes, and garbage to go through."""
        import gc

        from torch._inductor.async_compile import shutdown_compile_workers

        shutdown_compile_workers()
        gc.collect()
        gc.freeze()
        gc.disable()

    def time_runs(self, repeats: int) -> list[float]:
        """Return the microseconds of each of some steps from a host's call to the end on the device."""
        from bench.graph_timing import samples_us

        self._settle()
        return samples_us(self.timed.run, repeats)

    def time_uncaptured(self, repeats: int) -> list[float]:
        """Return the microseconds of each of some steps launched kernel by kernel."""
        from bench.graph_timing import samples_us

        self._settle()
        return samples_us(self.timed.run_uncaptured, repeats)

    def counts(self) -> dict[str, int]:
        """Return how often something was compiled and captured in this process, and how many graphs a step replays."""
        from bench.whole_step import compiled_graphs

        captures = self.timed.step.captures if self.job.kind != "decode" else 0
        return {"recompiles": compiled_graphs(), "recaptures": captures, "graphs": len(self.timed.graphs())}

    def kernels(self) -> list[tuple[str, float, float]]:
        """Return the kernels of a step, longest first: name, microseconds and launches a step."""
        from bench.graph_timing import kernels_of

        self._settle()
        found = kernels_of(self.timed.run, 5)
        return sorted(((name[:160], us, round(count, 1)) for name, (us, count) in found.items()), key=lambda row: -row[1])

    def _settle(self) -> None:
        self.timed.rewind()
        for _ in range(WARMUPS):
            self.timed.run()


def _serve(pipe: Connection, job: Job) -> None:
    # What every side needs is imported while others compile; the model waits, since all at once would not fit the device.
    import bench.whole_step  # noqa: F401

    side: _Side | None = None
    failure = ""
    while True:
        try:
            request, arguments = pipe.recv()
        except EOFError:
            return
        answer = None
        try:
            side = side or _Side(job)
            answer = None if failure else getattr(side, request)(*arguments)
        except Exception as error:
            failure = failure or _told(error)
        pipe.send((answer, failure))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
