"""Do the tests that need a GPU pass? ``python -m bench.gpu_tests`` runs them in many processes at once and keeps the outcome.

Nearly all their time goes into compiling each case's kernels for the first time, one after the other in a process; so there are
as many processes as cores, and each takes another test when it has finished one. The files that compile whole models come
first. Every outcome is written to bench/results/gpu_tests.json as it comes, so a run that is cut short tells what it has, and
how many tests it has not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.machine import machine_line

RESULTS = Path(__file__).parent / "results" / "gpu_tests.json"
FILES = ("captured_decoding", "gpu_step", "gpu_families", "gpu_kernels", "gpu_policies", "gpu_attention", "gpu_encoding")
OUTCOMES = ("passed", "failed", "skipped")


class Outcomes:
    """A pytest plugin of the process that hands out the tests: counts what each file's tests did and writes it down."""

    def __init__(self, out: Path) -> None:
        self.out, self.started, self.asked = out, time.monotonic(), 0
        self.files: dict[str, dict[str, float]] = {}
        self.failures: dict[str, str] = {}
        self.written = 0.0

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.asked = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test is its call; setup and teardown count only where they keep it from passing.
        if report.when != "call" and report.outcome == "passed":
            return
        file = report.location[0].removeprefix("tests/")
        row = self.files.setdefault(file, dict.fromkeys((*OUTCOMES, "seconds"), 0))
        row[report.outcome] += 1
        row["seconds"] = round(row["seconds"] + report.duration, 1)
        if report.outcome == "failed":
            self.failures[report.nodeid] = report.longreprtext.strip().splitlines()[-1][:300]
        if time.monotonic() > self.written + 2:
            self.write()

    def write(self) -> dict[str, Any]:
        """Write what is known so far, and return it."""
        self.written = time.monotonic()
        totals = {outcome: sum(int(row[outcome]) for row in self.files.values()) for outcome in OUTCOMES}
        found: dict[str, Any] = {"machine": machine_line("tests"), "date": time.strftime("%Y-%m-%d")} | totals
        found["not_reached"] = max(0, self.asked - sum(totals.values()))
        found["wall_s"] = round(time.monotonic() - self.started)
        found |= {"files": dict(sorted(self.files.items())), "failures": self.failures}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(found, indent=1) + "\n")
        return found


def tell(found: dict[str, Any]) -> None:
    """Print what each file's tests did."""
    print(found["machine"])
    print(f"{'file':32}{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>9}")
    for file, row in found["files"].items():
        print(f"{file:32}{row['passed']:8.0f}{row['failed']:8.0f}{row['skipped']:8.0f}{row['seconds']:9.1f}")
    print(f"{found['passed']} passed, {found['failed']} failed, {found['not_reached']} not reached in {found['wall_s']} s")
    print(json.dumps(found), flush=True)


def main() -> None:
    """Run all tests marked ``gpu`` and print what each file's did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--files", default=",".join(FILES), help="of tests/, without test_ and .py, separated by commas")
    parser.add_argument("--seconds", type=float, default=1800, help="after which what has run is told, and the rest left out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    # The cores are busy with tests already; a pool of compilers for each process would only be in the way.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    outcomes = Outcomes(options.out)

    def give_up() -> None:
        tell(outcomes.write())
        # The tests' processes end with this one; waiting for what they are in the middle of could take minutes.
        os._exit(2)

    timer = threading.Timer(options.seconds, give_up)
    timer.daemon = True
    timer.start()
    files = [f"tests/test_{name}.py" for name in options.files.split(",")]
    spread = ["-n", str(options.processes), "--dist", "load", "--maxschedchunk", "1"]
    quiet = ["-q", "--tb=short", "--show-capture=no", "--durations=8", "-p", "no:cacheprovider", "-W", "ignore"]
    status = pytest.main(["-m", "gpu", *spread, *quiet, *files], plugins=[outcomes])
    timer.cancel()
    tell(outcomes.write())
    sys.exit(status)


if __name__ == "__main__":
    main()
