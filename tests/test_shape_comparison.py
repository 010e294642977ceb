"""What ``treewy bench-tree`` concludes from given figures."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from treewy_inductor.shape_comparison import ShapeCost, report

NONE = ShapeCost((), 2, 10.0, 1.0, 100.0, True)
MODEL = SimpleNamespace(dtype=torch.float32, device="cpu")


def reported(capsys: pytest.CaptureFixture[str], *shapes: ShapeCost, model: Any = MODEL) -> tuple[str, dict[str, Any]]:
    report(Console(width=100), [NONE, *shapes], model, "mtp")
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


def test_the_shape_of_most_tokens_a_second_pays(capsys: pytest.CaptureFixture[str]) -> None:
    chain, tree = ShapeCost((1, 1), 3, 15.0, 2.0, 133.3, True), ShapeCost((3, 3), 13, 16.0, 2.4, 150.0, True)
    text, figures = reported(capsys, chain, tree)
    assert "3,3 pays most, 1.50 times as fast as none: 2.40 tokens a step, where 1.60 would break even" in text
    assert figures["best"] == [3, 3]


def test_a_tree_that_costs_more_than_it_brings_does_not_pay(capsys: pytest.CaptureFixture[str]) -> None:
    text, figures = reported(capsys, ShapeCost((3, 3), 13, 30.0, 2.4, 80.0, True))
    assert "No tree pays here" in text
    assert figures["best"] == []


def test_a_float32_shape_with_another_text_is_wrong_and_never_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    other = ShapeCost((3, 3), 13, 16.0, 2.4, 150.0, False)
    text, figures = reported(capsys, other)
    assert "wrong" in text
    assert "150.0" not in "".join(text.splitlines()[:-1])
    assert figures["best"] == []
    low = SimpleNamespace(dtype=torch.bfloat16, device="cpu")
    assert reported(capsys, other, model=low)[1]["best"] == [3, 3]
