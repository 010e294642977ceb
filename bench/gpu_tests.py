"""Do the tests that need a GPU pass? ``python -m bench.gpu_tests`` runs them in many processes at once and keeps the outcome.

Nearly all their time goes into compiling each case's kernels for the first time, one after the other in a process; so there are
as many processes as cores, and each takes another test when it has finished one. Tests that compile whole models come first,
one a process. Every outcome is written to bench/results/gpu_tests.json as it comes, so a run that is cut short tells what it
has, and how many tests it has not reached. A run of some files leaves the others' rows there as they were: each row says at
which commit its file ran.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScheduling

from bench.machine import machine_line

RESULTS = Path(__file__).parent / "results" / "gpu_tests.json"
# Those of the first compile models for a minute each; the others' tests take a few seconds.
MODELS = ("captured_decoding", "captured_drafting", "gpu_commands", "gpu_step", "gpu_families")
FILES = (*MODELS, "gpu_kernels", "gpu_policies", "gpu_attention", "gpu_combined", "gpu_encoding")
OUTCOMES = ("passed", "failed", "skipped")


class ModelsFirst(LoadScheduling):
    """Gives every process one test that compiles a model, and a short one, which it has to hold beside it."""

    def _send_tests(self, node: Any, num: int) -> None:
        if self.collection is not None and len(self.pending) == len(self.collection):
            is_model = {i: _file_of(self.collection[i])[5:-3] in MODELS for i in self.pending}
            models, others = ([i for i in self.pending if is_model[i] is which] for which in (True, False))
            spread = len(self.nodes)
            firsts = [i for pair in zip(models[:spread], others[:spread], strict=False) for i in pair]
            given = set(firsts)
            self.pending[:] = firsts + [i for i in (*models, *others) if i not in given]
        super()._send_tests(node, num)


class Outcomes:
    """A pytest plugin of the process that hands out the tests: counts what each file's tests did and writes it down."""

    def __init__(self, out: Path) -> None:
        self.out, self.started, self.written = out, time.monotonic(), 0.0
        self.machine, self.date = machine_line("tests"), time.strftime("%Y-%m-%d")
        self.files: dict[str, dict[str, Any]] = {}
        self.others: dict[str, dict[str, Any]] = json.loads(out.read_text())["files"] if out.exists() else {}

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> LoadScheduling:
        return ModelsFirst(config, log)

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.files = self.files or {
            file: {
                "machine": self.machine,
                "date": self.date,
                **dict.fromkeys(OUTCOMES, 0),
                "not_reached": count,
                "seconds": 0.0,
            }
            for file, count in Counter(_file_of(each) for each in ids).items()
        }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test is its call; setup and teardown count only where they keep it from passing.
        if report.when != "call" and report.outcome == "passed":
            return
        row = self.files[_file_of(report.nodeid)]
        row[report.outcome] += 1
        row["not_reached"] -= 1
        row["seconds"] = round(row["seconds"] + report.duration, 1)
        if report.outcome == "failed":
            row.setdefault("failures", {})[report.nodeid] = report.longreprtext.strip().splitlines()[-1][:300]
        if time.monotonic() > self.written + 2:
            self.write()

    def write(self) -> dict[str, Any]:
        """Write what is known so far, and return it."""
        self.written = time.monotonic()
        rows = dict(sorted((self.others | self.files).items()))
        totals = {outcome: sum(row[outcome] for row in rows.values()) for outcome in (*OUTCOMES, "not_reached")}
        found = totals | {"last_run_s": round(time.monotonic() - self.started), "files": rows}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(found, indent=1) + "\n")
        return found


def _file_of(test: str) -> str:
    return test.partition("::")[0].removeprefix("tests/")


def tell(found: dict[str, Any]) -> None:
    """Print what each file's tests did."""
    print(f"{'file':28}{'passed':>8}{'failed':>8}{'skipped':>8}{'left':>6}{'seconds':>9}  commit")
    for file, row in found["files"].items():
        counts = f"{row['passed']:8}{row['failed']:8}{row['skipped']:8}{row['not_reached']:6}{row['seconds']:9.1f}"
        print(f"{file:28}{counts}  {row['machine'].rpartition(' ')[2]}")
    print(f"{found['passed']} passed, {found['failed']} failed, {found['not_reached']} not reached in {found['last_run_s']} s")
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
    print(outcomes.machine, flush=True)

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
