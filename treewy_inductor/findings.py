"""What the compiler found in a model, as plain data: the result of :func:`treewy_inductor.explanation.explain`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from treewy_inductor.report_graph import GraphNode


@dataclass(frozen=True)
class FoundRecurrence:
    """A recurrence that was proven and rewritten.

    Attributes:
        layer: the number the cache gave it.
        module: path of the module in the user's model, such as ``model.layers.0.linear_attn``; empty if unknown.
        source: ``file:line`` in the user's model where the state is last computed.
        code: the text of that line.
        rule: what it was proven to be.
        roles: role to the node that plays it, such as ``{"key": "mul_3 f32[2, 7, 2, 4]"}``.
        error: of the region against the literal rule in the proof, relative.
        runner_up: error of the best other assignment of roles; infinite if no other fits the shapes.
        proof_seconds: how long the proof took; 0 if an equal layer had been proven before.
        proven_by: the layer whose proof was taken over, or its own number.
        nodes_before, nodes_after: of the graph, for this recurrence alone.
        bytes_kept: what is kept of each draft node until the commit, in bytes.
        bytes_of_state: one state of this layer and row: what keeping a copy per node would cost.
        before, after: the two graphs.
    """

    layer: int
    module: str
    source: str
    code: str
    rule: str
    roles: dict[str, str]
    error: float
    runner_up: float
    proof_seconds: float
    proven_by: int
    nodes_before: int
    nodes_after: int
    bytes_kept: int
    bytes_of_state: int
    before: tuple[GraphNode, ...] = field(default=(), repr=False)
    after: tuple[GraphNode, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class RefusedRegion:
    """A place the compiler looked at and left as it was.

    Attributes:
        layer: the number the cache gave it, -1 if it belongs to none.
        node, op: where the search or the proof stopped.
        module, source, code, callers: where that is in the user's model; the calls of a function that the line is in.
        reason: why, in a sentence.
        graph: what lies between the recurrence's states.
    """

    layer: int
    node: str
    op: str
    module: str
    source: str
    code: str
    reason: str
    callers: tuple[str, ...] = ()
    graph: tuple[GraphNode, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Explanation:
    """What the compiler found in a model.

    Attributes:
        model: the class of the model.
        recurrences: proven ones, by layer.
        refusals: those refused, by layer.
        graphs: how many graphs the model became; the tree needs one.
        nodes_before, nodes_after: of the whole graph.
        convolutions: short convolutions that became tree convolutions.
        compile_seconds: from the call to the rewritten graph: tracing and proofs, no code generation.
        rewrite_seconds: of these, what finding, proving and rewriting took.
        accept: a proof's error must be below this, relative.
        margin: the runner-up's must be above this.
        versions: package to version.
    """

    model: str
    recurrences: tuple[FoundRecurrence, ...]
    refusals: tuple[RefusedRegion, ...]
    graphs: int
    nodes_before: int
    nodes_after: int
    convolutions: int
    compile_seconds: float
    rewrite_seconds: float
    accept: float
    margin: float
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the graphs' nodes as values that JSON takes."""
        result = asdict(self)
        for recurrence in result["recurrences"]:
            del recurrence["before"], recurrence["after"]
        for refusal in result["refusals"]:
            del refusal["graph"]
        return result

    def verdict(self) -> str:
        """Return one sentence: whether a tree can be verified on this model."""
        if self.refusals:
            layers = ", ".join(str(refusal.layer) for refusal in self.refusals)
            return f"A tree cannot be verified on this model: refused at layer {layers}."
        if not self.recurrences:
            return "No recurrence was found: the inputs hold no TreeCache, or the model has no layer that reads a state."
        proofs = len({recurrence.proven_by for recurrence in self.recurrences})
        return f"{_count(len(self.recurrences), 'recurrence')} proven with {_count(proofs, 'proof')}: trees can be verified."

    def text(self) -> str:
        """Return the report as text, for a terminal."""
        from treewy_inductor.report_text import render

        return render(self)

    def html(self) -> str:
        """Return the report as one HTML page that needs nothing else."""
        from treewy_inductor.report_html import render

        return render(self)

    def save(self, path: str) -> None:
        """Write :meth:`html` to ``path``."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.html())

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.html()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
