"""Run a test file's checks of kernels where Triton interprets them: it decides when a kernel is defined, so in a process apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib, sys, traceback
for check in importlib.import_module(sys.argv[1]).CHECKS:
    try:
        check()
        print("PASSED", check.__name__)
    except Exception:
        print("FAILED", check.__name__, repr(traceback.format_exc()))
"""


def outcomes_of(module: str) -> dict[str, str]:
    """Run every function in ``CHECKS`` of a module in one process; return what each said, nothing where it passed."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, module],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line.split(" ", 2) for line in run.stdout.splitlines() if line.startswith(("PASSED ", "FAILED "))]
    return {line[1]: "" if line[0] == "PASSED" else line[2] for line in lines}
