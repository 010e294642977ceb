"""Do the kernels read or write where they must not, or race? ``python -m bench.sanitize``

Runs the tests of the kernels on a GPU under compute-sanitizer, which comes with CUDA: memcheck for addresses out of bounds,
racecheck for hazards in shared memory. Only our own kernels are watched, not PyTorch's, and one that strays on purpose, which
memcheck has to find. Without PyTorch's caching of memory
every tensor is an allocation of its own, so that an address just past a tensor is seen. The tests are dealt out to several
processes a tool, all at once, and the outcome is written to bench/results/sanitizer.json. Under pytest this module is the
plugin that lets no test start when time is up, so that a tool still says what it has seen.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.machine import machine_line

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "sanitizer.json"
FILES = ("gpu_kernels", "gpu_policies", "gpu_attention", "gpu_combined")
# What Inductor compiles are the same kernels, and its processes of their own would have to be watched as well; policies run the
# same kernels for all models.
CHOSEN = "not compiled and not olmo and not three"
# That a tool needs to end once its tests have.
SECONDS_TO_END = 20
ENDS = pytest.StashKey[float]()
TOOLS = {"memcheck": r"ERROR SUMMARY: (\d+) error", "racecheck": r"RACECHECK SUMMARY: (\d+) hazard"}


def kernel_names() -> list[str]:
    """Return the names of the kernels in lowerings/, and of what they call, which is no kernel of its own."""
    sources = "".join(file.read_text() for file in sorted((ROOT / "lowerings").glob("*_kernel.py")))
    return re.findall(r"^@triton\.jit.*\ndef (\w+)\(", sources, re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, help="after which no test starts")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[ENDS] = time.monotonic() + session.config.getoption("--seconds")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if time.monotonic() > item.session.stash[ENDS]:
        item.session.shouldstop = "time is up"


def collect(files: list[str]) -> list[str]:
    """Return the ids of the tests in tests/test_<file>.py."""
    paths = [f"tests/test_{file}.py" for file in files]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-k", CHOSEN, *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise RuntimeError(f"pytest cannot list the tests: {listed.stdout[-2000:]}{listed.stderr[-2000:]}")
    return [line for line in listed.stdout.splitlines() if "::" in line]


def reported(tool: str, module: list[str], seconds: float) -> tuple[str, str, str]:
    """Run ``python -m module`` under ``tool``; return the tool's report, and what the module printed and complained of."""
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        kernels = [word for name in (*kernel_names(), "straying_kernel") for word in ("--kernel-name", f"kne={name}")]
        command = ["compute-sanitizer", "--tool", tool, "--log-file", log.name, *kernels, sys.executable, "-m", *module]
        said, complaint = output_of(command, seconds)
        return Path(log.name).read_text(errors="replace"), said, complaint


def finds_the_straying_kernel(seconds: float) -> bool:
    """Return whether memcheck counts errors of a kernel that writes where it must not."""
    report, _, _ = reported("memcheck", ["bench.straying_kernel"], seconds)
    return any(map(int, re.findall(TOOLS["memcheck"], report)))


def watched(tool: str, tests: list[str], seconds: float) -> dict[str, Any]:
    """Run ``tests`` in one process under ``tool``; return how many passed, what the tool counted, and its first findings."""
    module = ["pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=line", "-p", "bench.sanitize"]
    report, said, complaint = reported(tool, [*module, "--seconds", str(seconds), *tests], seconds + SECONDS_TO_END)
    passed, counted = re.search(r"(\d+) passed", said), re.findall(TOOLS[tool], report)
    row: dict[str, Any] = {"passed": int(passed[1]) if passed else 0, "tests": len(tests)}
    # A tool that says nothing has watched nothing.
    row["found"] = sum(map(int, counted)) if counted else None
    if row["found"] != 0 or row["passed"] != len(tests):
        row["said"] = "\n".join([*report.splitlines()[:12], *said.splitlines()[-6:], *complaint.splitlines()[-3:]])
    return row


def output_of(command: list[str], seconds: float) -> tuple[str, str]:
    """Return what ``command`` prints in ``seconds``, then end it with all that it started: what it watches as well."""
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, complaint = process.communicate()
            return said, f"{complaint}\nended after {seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--files", default=",".join(FILES), help="of tests/, without test_ and .py, separated by commas")
    parser.add_argument("--processes", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2))
    parser.add_argument("--seconds", type=float, default=900, help="after which no test starts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available() or not shutil.which("compute-sanitizer"):
        parser.error("a CUDA device and compute-sanitizer in PATH are needed")
    about = {"machine": machine_line("tests"), "date": time.strftime("%Y-%m-%d")}
    tests = collect(options.files.split(","))
    print(f"{about['machine']} | {len(tests)} tests", flush=True)
    tools = options.tools.split(",")
    share = max(1, options.processes // len(tools))
    jobs = [(tool, tests[first::share]) for tool in tools for first in range(min(share, len(tests)))]
    with ThreadPoolExecutor(len(jobs) + 1) as pool:
        is_found = pool.submit(finds_the_straying_kernel, options.seconds)
        rows = list(pool.map(lambda job: watched(*job, options.seconds), jobs))
    about["straying_kernel"] = "found" if is_found.result() else "not found"
    print(f"the kernel that strays on purpose: {about['straying_kernel']}")
    results: dict[str, Any] = {}
    for tool in tools:
        own = [row for (name, _), row in zip(jobs, rows, strict=True) if name == tool]
        found = [row["found"] for row in own if row["found"] is not None]
        results[tool] = {"passed": sum(row["passed"] for row in own), "tests": len(tests)}
        results[tool] |= {"found": sum(found), "silent": len(own) - len(found)}
        said = [row["said"] for row in own if "said" in row]
        print(f"{tool}: {results[tool]}", *said[:3], sep="\n", flush=True)
        if said:
            results[tool]["said"] = said[0][:3000]
    options.out.write_text(json.dumps({**about, **results}, indent=1) + "\n")
    is_clean = is_found.result() and all(
        row["found"] == row["silent"] == 0 and row["passed"] == row["tests"] for row in results.values()
    )
    print(json.dumps({**about, **results, "is_clean": is_clean}))
    sys.exit(not is_clean)


if __name__ == "__main__":
    main()
