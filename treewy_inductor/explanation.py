"""``treewy.explain(model, *inputs)``: compile a model as the backend would, and say what was found in it.

Nothing is run: the compile stops at the rewritten graph, so no code is generated and the model's cache stays as it is.
What was compiled before stays compiled, since Dynamo keeps the graphs of different backends apart.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from treewy_inductor import backend, records
from treewy_inductor.capture_graphs import CapturedGraph, CapturePass
from treewy_inductor.errors import UnprovenRecurrence
from treewy_inductor.findings import Explanation, FoundRecurrence, RefusedRegion
from treewy_inductor.passes.certify import AGREES, DISAGREES


def explain(model: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Explanation:
    """Compile ``model(*inputs, **kwargs)`` without running it and return every recurrence proven and everything refused.

    Args:
        model: a module or function, compiled or not.
        inputs, kwargs: what it would be called with: for a model of transformers, ``**cache.inputs(tokens)``.

    Returns:
        The explanation: ``print`` it, take ``.to_dict()``, or ``.save("report.html")``.

    Raises:
        torch._dynamo.exc.Unsupported: the model does not become one graph; the error names the line.
    """
    model = getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", None) or model
    captures: list[CapturePass] = []

    def stop_at_the_graph(module: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        captures.append(CapturePass())
        options = {f"{backend.PREFIX}codegen": False, backend.SLOT: captures[-1]}
        backend.treewy(module, example_inputs, options=options)
        return _stop

    started = time.perf_counter()
    with torch.no_grad(), records.collect() as found:
        try:
            torch.compile(model, backend=stop_at_the_graph, fullgraph=True, dynamic=False)(*inputs, **kwargs)
        except _Compiled:
            pass
        except Exception as error:
            # A refusal is the answer here, not a failure; Dynamo wraps it in an error of its own.
            if not any(isinstance(cause, UnprovenRecurrence) for cause in _causes(error)):
                raise
    seconds = time.perf_counter() - started
    proven = [record for record in found if isinstance(record, records.Proven)]
    captured = captures[-1].captured if captures else CapturedGraph()
    return Explanation(
        model=type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "function"),
        recurrences=tuple(_recurrence(record, captured) for record in proven if record.kind != "causal_conv1d"),
        refusals=tuple(_refusal(record, captured) for record in found if isinstance(record, records.Refused)),
        graphs=len(captures),
        nodes_before=len(captured.before),
        nodes_after=len(captured.after),
        convolutions=sum(record.kind == "causal_conv1d" for record in proven),
        compile_seconds=seconds,
        rewrite_seconds=captured.seconds,
        accept=AGREES,
        margin=DISAGREES,
        versions=dict(_versions("torch", "transformers", "treewy-inductor")),
    )


class _Compiled(BaseException):
    """The graph is there, and nothing is to be run. Not an Exception, so that nothing on the way takes it for an error."""


def _stop(*_: Any) -> NoReturn:
    raise _Compiled


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or getattr(error, "inner_exception", None)


def _recurrence(record: records.Proven, captured: CapturedGraph) -> FoundRecurrence:
    ends = captured.ends[record.layer, record.slot]
    before, after = captured.regions(record)
    return FoundRecurrence(
        layer=record.layer,
        module=record.module,
        source=record.source,
        code=record.code,
        rule=_rule(record.kind, record.facts),
        roles={role: f"{record.roles[role]} {captured.before[record.roles[role]].shape}" for role in _in_order(record.roles)},
        error=record.error,
        runner_up=record.runner_up,
        proof_seconds=record.seconds,
        proven_by=record.proven_by,
        nodes_before=record.nodes_before,
        nodes_after=record.nodes_after,
        bytes_kept=ends.bytes_kept,
        bytes_of_state=ends.bytes_of_state,
        before=before,
        after=after,
    )


def _in_order(roles: dict[str, str]) -> list[str]:
    known = ("query", "key", "value", "log_decay", "decay", "beta", "output")
    return sorted(roles, key=lambda role: known.index(role) if role in known else len(known))


def _refusal(record: records.Refused, captured: CapturedGraph) -> RefusedRegion:
    return RefusedRegion(
        layer=record.layer,
        node=record.node,
        op=record.op,
        module=record.module,
        source=record.source,
        code=record.code,
        reason=record.reason,
        callers=record.callers,
        graph=captured.refused_region(record),
    )


def _rule(kind: str, facts: dict[str, object]) -> str:
    """Say what was proven in a few words."""
    parts = [{"log": "log decay", "itself": "decay itself"}.get(str(facts.get("decay")), "no decay")]
    if facts.get("vector_decay"):
        parts[0] += " of each channel"
    if facts.get("key_heads") != facts.get("value_heads"):
        parts.append(f"{facts.get('key_heads')} key heads for {facts.get('value_heads')}")
    norm_eps, scale = facts.get("norm_eps"), facts.get("scale")
    if isinstance(norm_eps, float) and norm_eps >= 0:
        parts.append(f"l2 norm with {norm_eps:g}")
    if isinstance(scale, float) and scale != 1:
        parts.append(f"scale {scale:.4g}")
    return f"{'gated delta rule' if kind == 'gated_delta' else 'linear attention'} ({', '.join(parts)})"


def _versions(*packages: str) -> Iterator[tuple[str, str]]:
    for package in packages:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
