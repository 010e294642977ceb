"""What the passes proved and what they refused, as plain data.

A compile appends one record for each recurrence and each convolution it met. They are kept only while :func:`collect` is
open in the compiling thread; compiled-code caches are bypassed meanwhile, since a cached graph is not proven again.
"""

from __future__ import annotations

import linecache
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\w+))?')
# Where a model's line calls torch's own Python code or a TreeCache, that line is meant.
_PACKAGES = [f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__)]
_NOT_THE_USERS = (*_PACKAGES, os.path.join(str(Path(torch.__file__).parents[1]), "transformers", "cache_utils.py"))


@dataclass(frozen=True)
class Proven:
    """A region that was run against its literal rule, agreed, and was rewritten.

    Attributes:
        kind: ``"gated_delta"``, ``"linear_attention"`` or ``"causal_conv1d"``.
        layer, slot: what the cache numbered it with.
        roles: role to the name of the node that plays it, such as ``{"query": "view_3"}``.
        facts: what else was proven, such as ``{"scale": 0.25, "norm_eps": 1e-6}``.
        error: relative error of the region against the rule, in float64.
        runner_up: error of the best other reading of the region; infinite if no other fits the shapes.
        nodes_before, nodes_after: nodes of the region, and of what replaces it.
        source: ``file:line`` in the user's model where the state is last computed; empty if unknown.
        code: the text of that line.
        module: path of the module in the user's model, such as ``model.layers.0.linear_attn``.
        seconds: what the proof took; 0 if an equal region had been proven before.
        proven_by: the layer whose proof was taken over, or its own number.
    """

    kind: str
    layer: int
    slot: int
    roles: dict[str, str]
    facts: dict[str, object]
    error: float
    runner_up: float
    nodes_before: int
    nodes_after: int
    source: str
    code: str
    module: str
    seconds: float
    proven_by: int


@dataclass(frozen=True)
class Refused:
    """A region that was left as it was.

    Attributes:
        kind, layer, slot: as in :class:`Proven`.
        node: the node at which the search or the proof ended, and ``op``, what it computes.
        reason: why, in a sentence.
        source, code, module: where that node is in the user's model.
        callers: if that is in a function of the user's, the lines that call it, up to a module's forward: ``file:line: code``.
    """

    kind: str
    layer: int
    slot: int
    node: str
    op: str
    reason: str
    source: str
    code: str
    module: str
    callers: tuple[str, ...] = ()

    def sentence(self) -> str:
        """Return the refusal in a line: layer, reason, node, source."""
        where = f"{self.source}: {self.code}" if self.source else "source unknown"
        what = {"gated_delta": "recurrence", "causal_conv1d": "convolution"}.get(self.kind, self.kind)
        layer = f"layer {self.layer} ({self.module or 'module unknown'})"
        return f"{layer}, {what}: {self.reason}; node {self.node} ({self.op}), {where}"


Record = Proven | Refused


@dataclass
class _Collector(threading.local):
    open_lists: list[list[Record]] = field(default_factory=list)


_collector = _Collector()


@contextmanager
def collect() -> Iterator[list[Record]]:
    """Gather the records of every compile in this thread; yields the list that is being filled."""
    found: list[Record] = []
    _collector.open_lists.append(found)
    try:
        yield found
    finally:
        _collector.open_lists.remove(found)


def is_collecting() -> bool:
    """Whether :func:`collect` is open in this thread."""
    return bool(_collector.open_lists)


def note(record: Record) -> None:
    """Add a record to every open :func:`collect` of this thread."""
    for found in _collector.open_lists:
        found.append(record)


def source_of(node: fx.Node) -> tuple[str, str]:
    """Return ``file:line`` and the text of the line of the user's model that made a node; empty if unknown."""
    calls = _calls_of(node)
    return calls[0][:2] if calls else ("", "")


def callers_of(node: fx.Node) -> tuple[str, ...]:
    """Return ``file:line: code`` of the calls that lead to a node's line, the nearest first, up to a ``forward``."""
    calls = _calls_of(node)
    inside = next((i for i, (_, _, function) in enumerate(calls) if function == "forward"), 0)
    return tuple(f"{source}: {code}" for source, code, _ in calls[1 : inside + 1])


def _calls_of(node: fx.Node) -> list[tuple[str, str, str]]:
    """Return ``file:line``, its text and the function around it of each of the user's calls, the innermost first."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")[::-1]
    theirs = [frame for frame in frames if not frame[0].startswith(_NOT_THE_USERS)] or frames[:1]
    return [(f"{file}:{line}", linecache.getline(file, int(line)).strip(), function) for file, line, function in theirs]


def line_of(node: fx.Node, beside: fx.Node) -> str:
    """Return `` of line 7``, with the file if it is not that of the node ``beside``; empty if unknown."""
    file, _, line = source_of(node)[0].rpartition(":")
    if not line:
        return ""
    same = file == source_of(beside)[0].rpartition(":")[0]
    return f" of line {line}" if same else f" of {Path(file).name}:{line}"


def module_of(node: fx.Node) -> str:
    """Return the path of the innermost user's module that made a node; empty if unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    # Dynamo writes L['self']._modules['model'] or L['args'][0].model, and brackets around what is no identifier.
    path = re.sub(r"^L\['\w+'\](\[\d+\])?\.?|^self\.?", "", path)
    return re.sub(r"_modules\['([^']+)'\]|\['?([^'\]]+)'?\]", r".\1\2", path).replace("..", ".").strip(".")


def refuse(kind: str, layer: int, slot: int, node: fx.Node, reason: str) -> Refused:
    """Make the record of a refusal at a node."""
    source, code = source_of(node)
    return Refused(kind, layer, slot, node.name, str(node.target), reason, source, code, module_of(node), callers_of(node))
