"""Run a script in two processes, one after the other, that share a compile cache which is empty at first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def words_of_two_processes(script: str, cache: Path) -> tuple[list[str], list[str]]:
    """Return the words that ``script`` printed in the first process and in the second; fail if either did."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}

    def words() -> list[str]:
        run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr[-2000:]
        return run.stdout.split()

    return words(), words()
