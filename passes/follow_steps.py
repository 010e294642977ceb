"""Follow the rule's steps through a region that disagreed, to say which one it does not take and at which line.

A step (rule_steps.py) is in a region if some node has its values, in whatever order its axes are. Where one is missing, what
is written by mistake in its place is looked for. A region that does not go token by token has no steps, and nothing is said.
This proves nothing: it is asked only about a region that has already disagreed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from treewy_inductor.passes.evaluate_region import evaluate
from treewy_inductor.passes.propose_region import VIEWS, Region
from treewy_inductor.passes.readings import Operands, Reading, operands
from treewy_inductor.passes.rule_steps import CORRECTING, DECAYED, OUTPUT, WITHOUT_CORRECTION, Step, Values
from treewy_inductor.records import line_of

aten = torch.ops.aten

MAX_READINGS = 64
TOKENS = ("first", "second")
SAME = 1e-9
_MOVES = VIEWS | {aten.select.int, aten.slice.Tensor, aten.expand.default, aten.cat.default, aten.stack.default}


@dataclass(frozen=True)
class Departure:
    """Where a region leaves the rule: the node, a sentence, and the reading it was followed by."""

    node: fx.Node
    sentence: str
    reading: Reading


@dataclass(frozen=True)
class _Trail:
    """How far a region was followed: its faults with the node and token of each, and the step that no node takes, if any."""

    taken: int = 0
    faults: tuple[tuple[fx.Node, str, int], ...] = ()
    missing: Step | None = None
    token: int = 0
    last: fx.Node | None = None
    outputs: tuple[fx.Node, ...] = ()

    @property
    def worth(self) -> int:
        # A wrong reading gets on by mistake after mistake.
        return self.taken - 2 * len(self.faults)


def first_departure(region: Region, tried: Sequence[Reading], draw: dict[fx.Node, Tensor], state: Tensor) -> Departure | None:
    """Return where a region leaves the rule, followed by whichever reading it takes most steps of; none if that is not seen.

    Args:
        tried: readings, the likeliest first.
        draw, state: what stands at the frontier and at ``state_in``.
    """
    nodes = _Nodes(region, draw, state)
    if nodes.states < region.marked.sizes[1]:
        return None
    trails = [_follow(nodes, reading, operands(region, reading, draw), state) for reading in tried[:MAX_READINGS]]
    best = max(range(len(trails)), key=lambda i: trails[i].worth)
    told = _tell(trails[best], nodes)
    return None if told is None else Departure(*told, tried[best])


class _Nodes:
    """The nodes of a region that know the state, found by their values."""

    def __init__(self, region: Region, draw: dict[fx.Node, Tensor], state: Tensor) -> None:
        marked = region.marked
        self.region, self.start = region, marked.state_in
        self.known: dict[int, list[fx.Node]] = {}
        self.marks: dict[int, list[Tensor]] = {}
        self.inside = {marked.state_in}
        for node in region.nodes:
            if not self.inside.isdisjoint(node.all_input_nodes):
                self.inside.add(node)
        # All but outputs lie on the way to the final state.
        self.feeding = {marked.final_state}
        for node in reversed(region.nodes):
            if node in self.feeding:
                self.feeding.update(node.all_input_nodes)
        self._note(marked.state_in, state)
        evaluate(region.nodes, {marked.state_in: state, **draw}, (), each=self._note)
        self.states = len(self.known[state.numel()])
        self.table = {size: torch.stack(marks) for size, marks in self.marks.items()}

    def _note(self, node: fx.Node, value: object) -> None:
        if node in self.inside and isinstance(value, Tensor) and value.is_floating_point():
            self.known.setdefault(value.numel(), []).append(node)
            self.marks.setdefault(value.numel(), []).append(_mark(value))

    def find(self, value: Tensor, is_output: bool) -> fx.Node | None:
        """Return the first node with these values, the axes in any order, and for an output at any scale."""
        if value.numel() not in self.known:
            return None
        wanted = _mark(value)
        off = (self.table[value.numel()] - wanted).abs() / (1 + wanted.abs())
        same = (off[:, is_output:].amax(1) < SAME).tolist()
        found = (node for node, is_same in zip(self.known[value.numel()], same, strict=True) if is_same)
        return next((node for node in found if is_output or node in self.feeding), None)

    def reader(self, node: fx.Node) -> fx.Node:
        """Return what first computes with a node's values, past what only moves or picks them."""
        seen, todo = {node}, [node]
        found: list[fx.Node] = []
        while todo:
            for user in todo.pop().users:
                if user in self.inside and user not in seen:
                    seen.add(user)
                    (todo if user.target in _MOVES else found).append(user)
        feeding = [each for each in found if each in self.feeding]
        return min(feeding or found, key=self.region.nodes.index, default=node)


def _mark(value: Tensor) -> Tensor:
    """Return numbers that tell values apart and do not change with the order of axes; the first alone tells their scale."""
    flat = value.double().flatten()
    root, scale = flat.numel() ** 0.5, flat.norm() / flat.numel() ** 0.5
    numbers = torch.stack([scale, flat.max(), flat.min(), flat.sum() / root, flat.norm(1) / root])
    numbers[1:] /= scale.clamp_min(1e-300)
    return numbers.cpu()


def _follow(nodes: _Nodes, reading: Reading, roles: Operands, state: Tensor) -> _Trail:
    steps = CORRECTING if reading.corrects else WITHOUT_CORRECTION
    path = [(token, step) for token in range(min(len(TOKENS), roles.v.shape[1])) for step in steps]

    def walk(place: int, x: Values, trail: _Trail) -> _Trail:
        if place == len(path):
            return trail
        token, step = path[place]
        if step is DECAYED:
            x = x | _of_token(roles, token)
        onward = []
        for way in step.ways:
            value = way.value(x)
            node = nodes.find(value, is_output=step is OUTPUT)
            if node is None:
                continue
            # Any region holds the state that it was given.
            taken = trail.taken + (not (step is DECAYED and way.fault))
            faults = (*trail.faults, (node, way.fault, token)) if way.fault else trail.faults
            outputs = (*trail.outputs, node) if step is OUTPUT else trail.outputs
            onward.append(walk(place + 1, x | {step.sets: value}, _Trail(taken, faults, None, token, node, outputs)))
        if onward:
            return max(onward, key=lambda each: each.worth)
        return walk(place + 1, x, trail) if step.may_lack else replace(trail, missing=step, token=token)

    return walk(0, {"S": state}, _Trail(last=nodes.start))


def _of_token(roles: Operands, token: int) -> Values:
    q, k, v, a = (x[:, token] for x in (roles.q, roles.k, roles.v, roles.decay))
    b = roles.beta[:, token, :, None]
    return {"q": q, "k": k, "v": v, "a": a[..., None], "b": b, "u": b * v}


def _tell(trail: _Trail, nodes: _Nodes) -> tuple[fx.Node, str] | None:
    order = nodes.region.nodes.index
    if trail.missing is not None and trail.faults[-1:] == ((trail.last, DECAYED.ways[1].fault, trail.token),):
        # Nothing that follows was found either: it is not that the decay is left out.
        trail = replace(trail, faults=trail.faults[:-1], missing=DECAYED)
    if trail.faults:
        first = [(node, fault) for node, fault, token in trail.faults if token == trail.faults[0][2]]
        at = [node for node, _ in first if node is not nodes.start]
        node = min(at, key=order) if at else nodes.reader(nodes.start)
        return node, "; ".join(fault for _, fault in first)
    if trail.missing is None:
        # All steps are taken, so the outputs are: what is wrong is what becomes of them.
        node = nodes.reader(trail.outputs[0])
        return None if node is trail.outputs[0] else (node, "the outputs are those of the rule until this changes them")
    assert trail.last is not None
    node = nodes.reader(trail.last)
    sentence = f"for its {TOKENS[trail.token]} token nothing computes {trail.missing.formula}"
    others = [_origin(each) for each in node.all_input_nodes if each not in nodes.inside]
    named = ", ".join(f"{each.name}{line_of(each, node)}" for each in others)
    return node, sentence + (f" (this takes {named})" if named else "")


def _origin(node: fx.Node) -> fx.Node:
    while node.target in _MOVES and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
