"""Errors that a compile may end with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

import torch

from treewy_inductor import compat

if TYPE_CHECKING:
    from treewy_inductor.records import Refused


class MisusedTreeCache(compat.error_of_dynamo(), ValueError):  # type: ignore[misc]
    """A model was called on a TreeCache with other arguments than ``TreeCache.inputs`` returns; says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=sys._getframe(1))  # type: ignore[call-arg]
        self.message = message

    def __str__(self) -> str:
        # Dynamo adds the stack inside the model to the arguments, which would bury what to do.
        return self.message


def misused(message: str) -> NoReturn:
    """Raise :class:`MisusedTreeCache`, also from code that Dynamo traces, which would wrap an ordinary error in its own."""
    raise MisusedTreeCache(message)


# Dynamo then calls it instead of tracing into it.
torch.compiler.assume_constant_result(misused)


class UnprovenRecurrence(RuntimeError):
    """A graph that reads a TreeCache holds a recurrence or convolution that could not be proven, so it was not compiled.

    Compiled as it stands, it would treat the tree as a chain and write wrong states.

    Attributes:
        refusals: one record for each place that was refused, with node, source line and reason.
    """

    def __init__(self, refusals: Sequence[Refused], is_dynamic: bool = False) -> None:
        self.refusals = list(refusals)
        places = "\n".join(_place(group) for group in grouped(self.refusals))
        super().__init__(
            f"{len(self.refusals)} of the places where this model reads its TreeCache could not be proven to be a recurrence "
            f"that a tree can be verified with, so the graph was not compiled:\n\n{places}\n\n"
            f"{_DYNAMIC if is_dynamic else ''}"
            "Change the named lines, or use the model with its ordinary cache. docs/refusals.md explains how to read this; "
            "treewy_inductor.explain(model, ...) shows what was proven beside it, and the graph as an HTML page"
        )


_DYNAMIC = (
    "Numbers of the model are inputs of this graph, so a proof has no value for them: compile with "
    "torch.compile(..., dynamic=False) first. "
)


class Refusal(Protocol):
    """What a record of a refusal and a report's have in common."""

    @property
    def layer(self) -> int: ...
    @property
    def module(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def reason(self) -> str: ...


R = TypeVar("R", bound=Refusal)


def grouped(refusals: Sequence[R]) -> list[list[R]]:
    """Put refusals for one reason at one line together: a model's equal layers are refused alike."""
    groups: dict[tuple[str, str], list[R]] = {}
    for refusal in refusals:
        groups.setdefault((refusal.source, refusal.reason), []).append(refusal)
    return list(groups.values())


def layers_of(group: Sequence[Refusal]) -> str:
    """Name the layers of a group: ``layer 0 (mixers.0), layer 1 (mixers.1)``."""
    return ", ".join(f"layer {each.layer}" + (f" ({each.module})" if each.module else "") for each in group)


def _place(group: Sequence[Refused]) -> str:
    first = group[0]
    what = {"gated_delta": "recurrence", "causal_conv1d": "convolution"}.get(first.kind, first.kind)
    code = f"\n      {first.code}" if first.code else ""
    code += "".join(f"\n    called at {caller}" for caller in first.callers)
    return (
        f"  {first.source or 'source unknown'}: {what} of {layers_of(group)}{code}\n"
        f"    {first.reason}\n    (node {first.node}, {first.op})"
    )
