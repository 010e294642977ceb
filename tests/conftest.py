"""What all tests share: no network, fixed seeds, skipped GPU tests where there is no GPU, and memory that starts as NaN."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def fresh_dynamo() -> Iterator[None]:
    """Let no file inherit another's compiled code or recompile count."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def nan_filled_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill whatever torch.empty and its kin return with NaN, so that an element that a kernel skips is seen."""

    def filled(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_and_fill(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            # Inductor allocates tensors that require gradients when it is first used.
            with torch.no_grad():
                return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return allocate_and_fill

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, filled(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, filled(getattr(torch.Tensor, name)))
