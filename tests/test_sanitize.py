"""bench.sanitize counts what compute-sanitizer says, and a tool that says nothing is no clean run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

from bench import sanitize


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, report: str, said: str) -> None:
    """Put a compute-sanitizer first in PATH that writes ``report`` to its log and prints ``said``."""
    script = folder / "compute-sanitizer"
    script.write_text(f"#!/bin/sh\nprintf '%s' '{report}' > \"$4\"\necho '{said}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.parametrize(
    ("tool", "report", "said", "found"),
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors", "2 passed in 1 s", 0),
        ("memcheck", "========= ERROR SUMMARY: 1 error", "2 passed in 1 s", 1),
        ("racecheck", "========= RACECHECK SUMMARY: 12 hazards displayed (3 errors, 9 warnings)", "2 passed in 1 s", 12),
        ("racecheck", "", "2 passed in 1 s", None),
        ("memcheck", "========= ERROR SUMMARY: 0 errors", "1 failed, 1 passed in 1 s", 0),
    ],
)
def test_what_a_tool_says_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, report: str, said: str, found: int | None
) -> None:
    stand_in(tmp_path, monkeypatch, report, said)
    row = sanitize.watched(tool, ["tests/a.py::b", "tests/a.py::c"], 60)
    assert row["found"] == found
    assert row["passed"] == (1 if "failed" in said else 2)
    assert ("said" in row) == (found != 0 or "failed" in said)


@pytest.mark.parametrize("errors", [0, 1])
def test_a_kernel_that_strays_has_to_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: int) -> None:
    stand_in(tmp_path, monkeypatch, f"========= ERROR SUMMARY: {errors} errors", "")
    assert sanitize.finds_the_straying_kernel(60) == bool(errors)


def test_every_kernel_that_is_launched_is_watched() -> None:
    names = sanitize.kernel_names()
    assert {"tree_gated_delta_kernel", "commit_state_kernel", "tree_attention_kernel", "fold_trunk_kernel"} <= set(names)


def test_the_tests_of_the_kernels_are_found() -> None:
    found = sanitize.collect(["gpu_kernels"])
    assert len(found) > 40 and not any("compiled" in test for test in found)


def test_a_tool_that_hangs_is_ended_with_what_it_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "", "1 passed")
    with (tmp_path / "compute-sanitizer").open("a") as script:
        script.write(f"(sleep 3; touch {tmp_path / 'still running'}) &\nwait\n")
    row = sanitize.watched("memcheck", ["tests/a.py::b"], 1 - sanitize.SECONDS_TO_END)
    assert row["found"] is None and "ended after 1 s" in row["said"]
    time.sleep(3)
    assert not (tmp_path / "still running").exists()


def test_no_test_starts_when_time_is_up() -> None:
    tests = ["test_a_table_whose_file_is_not_there_is_left_as_it_is", "test_numbers_are_written_with_two_digits"]
    named = [f"tests/test_results_page.py::{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "bench.sanitize", "--seconds", "0", *named]
    run = subprocess.run(command, cwd=sanitize.ROOT, capture_output=True, text=True, check=False)
    assert "1 passed" in run.stdout and "time is up" in run.stdout, run.stdout
