"""The commands on a GPU, as a user runs them, with the small model of the package: generated code and CUDA graphs."""

from __future__ import annotations

import json

import pytest

from tests.test_cli import run

pytestmark = pytest.mark.gpu
ON_GPU = ("--device", "cuda", "--widths", "2,2")


def test_demo_checks_itself() -> None:
    code, out, _ = run("demo", "--new-tokens", "24", *ON_GPU)
    figures = json.loads(out.splitlines()[-1])
    assert code == 0
    # In bfloat16, the default there, two tokens tie after this very prompt: plain decoding need not be matched, "ok" says.
    assert figures["ok"]
    assert figures["tokens"] == 24
    assert figures["graphs"] == 1


def test_generate_writes_the_same_text_with_every_drafter_and_seed_gives_the_same_again() -> None:
    common = ("generate", "--prompt", "def read_lines(path):\n", "--max-new-tokens", "24", "--json", *ON_GPU)
    code, out, _ = run(*common, "--drafter", "mtp")
    text = json.loads(out)["text"]
    assert code == 0
    assert json.loads(run(*common, "--drafter", "prompt_lookup")[1])["text"] == text
    again = [json.loads(run(*common, "--temperature", "1.0", "--seed", "1")[1])["text"] for _ in range(2)]
    assert again[0] == again[1]


def test_bench_tree_measures_every_shape_and_picks_one() -> None:
    code, out, _ = run("bench-tree", "--device", "cuda", "--shapes", "2,2", "--new-tokens", "16", "--rounds", "1")
    figures = json.loads(out.splitlines()[-1])
    assert code == 0
    assert [shape["widths"] for shape in figures["shapes"]] == [[], [2, 2]]
    assert all(shape["equal"] and shape["step_ms"] > 0 for shape in figures["shapes"])
    assert figures["best"] in [[], [2, 2]]
