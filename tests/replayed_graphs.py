"""Graphs that stand in for CUDA graphs where there is no device, and texts of a generation with its statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import treewy_inductor as treewy
from treewy_inductor import graph_capture
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.models import model_verifier
from treewy_inductor.models.mtp_drafter import MtpDrafter
from treewy_inductor.models.mtp_on_device import MtpOnDevice


class RunsAgain:
    """A graph whose replay runs the function and puts its results where the first run's lie."""

    def __init__(self, run: Callable[[], Any], captured: list[RunsAgain]) -> None:
        # The runs before a capture must leave no trace either.
        self.run, self.results = run, (run(), run())[1]
        self.replays = 0
        captured.append(self)

    def replay(self) -> None:
        self.replays += 1
        for kept, new in zip(self.results, self.run(), strict=True):
            if kept is not None:
                kept.copy_(new)

    def pool(self) -> None:
        return None


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RunsAgain]]:
    """Let steps be captured on the CPU; gives the stand-ins."""
    graphs: list[RunsAgain] = []

    def capture(run: Callable[[], Any], pool: Any = None) -> tuple[RunsAgain, Any]:
        graph = RunsAgain(run, graphs)
        return graph, graph.results

    def on_device(drafter: MtpDrafter, rows: int, places: int, widths: tuple[int, ...]) -> MtpOnDevice:
        return MtpOnDevice(MtpDrafter(drafter.prediction), rows, places, widths, compiled=False)

    monkeypatch.setattr(graph_capture, "capture_graph", capture)
    monkeypatch.setattr(model_verifier, "can_capture", lambda cache, options: True)
    monkeypatch.setattr(MtpDrafter, "captured", on_device)
    yield graphs
    model_verifier._graphs.clear()


def generate(model: Any, prompts: list[list[int]], count: int, **options: Any) -> tuple[list[list[int]], GenerationStatistics]:
    """Return each row's new tokens."""
    statistics = GenerationStatistics()
    cpu = {"compile_options": {"options": {"treewy.codegen": False}}} if model.device.type == "cpu" else {}
    out = treewy.generate(model, prompts, max_new_tokens=count, statistics=statistics, **cpu, **options)
    return out[:, max(map(len, prompts)) :].tolist(), statistics


def plain(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


def decisions(graphs: list[RunsAgain]) -> int:
    return sum(len(graph.results) == 3 for graph in graphs)
