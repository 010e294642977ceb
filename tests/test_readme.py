"""The README's example runs as printed, its commands are whole, and its links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import treewy_inductor as treewy
from tests.tiny_models import tiny_model
from treewy_inductor.backend import treewy as backend
from treewy_inductor.models import model_verifier

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLE = re.search(r"```python\n(import torch, .*?)```", README, re.DOTALL)


def test_example_verifies_and_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    real_compile = torch.compile

    def compile_op_by_op(model: torch.nn.Module, **options: Any) -> Any:
        # In a bare checkout no entry point names the backend, and generating C++ here would only take time.
        assert options.pop("backend") == "treewy"
        return real_compile(model, backend=backend, options={"treewy.codegen": False}, **options)

    monkeypatch.setattr(torch, "compile", compile_op_by_op)
    model = tiny_model()
    vocab = model.config.vocab_size
    names: dict[str, Any] = {
        "model": model,
        "prompt_ids": torch.randint(vocab, (1, 9)),
        "tokens": torch.randint(vocab, (1, 40)),
    }
    assert EXAMPLE is not None
    exec(EXAMPLE.group(1), names)
    assert names["path"][0, 0] == 0
    assert names["cache"].lengths.tolist() == [9 + int(names["count"])]

    # The tokens of one path alone, in the plain model, give the same logits.
    tree, last = names["treewy"].DraftTree.from_widths((3, 3, 3)), 39
    path = tree.path_to(last)
    line = torch.cat([names["prompt_ids"], names["tokens"][:, path]], 1)
    # Whoever copies the example does not write no_grad.
    assert torch.is_grad_enabled() and not names["logits"].requires_grad
    torch.testing.assert_close(names["logits"][0, last], model(line).logits[0, -1].detach(), rtol=1e-4, atol=1e-5)


def test_the_examples_of_generation_and_of_trees_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    generation, trees = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1:]
    real = model_verifier.compiled_step

    def op_by_op(model: Any, cache: Any, with_hidden: bool, options: dict[str, Any]) -> Any:
        return real(model, cache, with_hidden, {"options": {"treewy.codegen": False}} | options)

    monkeypatch.setattr(model_verifier, "compiled_step", op_by_op)
    model = tiny_model()
    names: dict[str, Any] = {"treewy": treewy, "model": model, "input_ids": torch.tensor([[5, 6, 7]] * 2), "root_token": 9}
    shown = generation.replace("treewy.generate", "text = treewy.generate", 1)
    exec(shown, names)
    assert names["text"].tolist() == model.generate(names["input_ids"], max_new_tokens=200, do_sample=False).tolist()
    exec(trees, names)
    assert (tmp_path / "tree.png").stat().st_size > 1000


@pytest.mark.parametrize("purpose", ["treewy demo", "python -m pytest"])
def test_commands_set_everything_up(purpose: str) -> None:
    command = next(
        line.strip() for line in README.splitlines() if line.startswith("    ") and purpose in line and "venv" in line
    )
    steps = command.split(" && ")
    assert steps[0].startswith("python3 -m venv .venv")
    assert steps[1] == ". .venv/bin/activate"
    assert "-c constraints.txt" in steps[2]
    assert steps[3].startswith(purpose)


def test_constraints_pin_torch() -> None:
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


def test_speeds_that_are_quoted_are_the_measured_ones() -> None:
    def result(name: str) -> dict[str, Any]:
        return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())  # type: ignore[no-any-return]

    text = " ".join(README.split())
    # A baseline that other processes slowed down would flatter: then the one of an undisturbed run is kept beside it.
    steps = {
        (row["model"], row["batch"]): row["step_us"] / row.get("undisturbed_decode", {"us": row["decode_us"]})["us"]
        for row in result("step")["rows"]
        if row["nodes"] == 40
    }
    single = sorted(ratio for (_, batch), ratio in steps.items() if batch == 1)
    assert f"costs {single[0]:.2f} to {single[-1]:.2f} times one token of stock compiled decoding at batch 1" in text
    assert f"and {steps['0.8B', 16]:.2f} times at batch 16" in text
    speed = {(row["model"], tuple(row["widths"])): row["tokens_per_second"] for row in result("tokens_per_second")["rows"]}
    gain = {(model, widths): each / speed[model, ()] for (model, widths), each in speed.items() if widths}
    assert f"give {gain['small', (1, 1, 1)]:.2f} times the tokens per second" in text
    assert all(each < 1 for (model, widths), each in gain.items() if model == "small" and widths != (1, 1, 1))
    assert all(f"all shapes give {each:.1f} times" in text for (model, _), each in gain.items() if model == "0.8B")


def test_links_lead_to_files() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
