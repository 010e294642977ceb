"""Run a region against the literal rule until exactly one reading of its frontier agrees.

Two runs in float64. The first draws all inputs alike and tells the readings apart by the first tokens of one head; the
second draws what the roles of the one that agreed may hold, strong decays, betas up to 2, keys of any length where they are
normalised inside, and compares every token, head and row, and the final state, for small and for huge states.

    B batch   N nodes   HV value heads   K key dim   V value dim   X readings   T tokens told apart
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from treewy_inductor.passes.draw_inputs import draw_alike, draw_roles, random_state
from treewy_inductor.passes.evaluate_region import evaluate
from treewy_inductor.passes.find_nonlinear import nonlinear_in_state
from treewy_inductor.passes.follow_steps import first_departure
from treewy_inductor.passes.literal_rule import literal_rule
from treewy_inductor.passes.marked_state import MarkedState
from treewy_inductor.passes.propose_region import Region, Unlike
from treewy_inductor.passes.readings import Operands, Reading, heads_of, lifted, operands, readings
from treewy_inductor.passes.relative_error import relative_error
from treewy_inductor.records import line_of

AGREES, DISAGREES = 1e-9, 1e-3
# The rule is linear in state and values, so it holds at any size of them; a bound on the state shows at a large one.
SIZES = (1.0, 1e9)
FIRST_TOKENS = 8

Layout = tuple[int, int, int, int]


@dataclass(frozen=True)
class Match:
    """A node that is the rule's output times ``scale``, its axes ``layout`` of ``[B, N, HV, V]``."""

    node: fx.Node
    layout: Layout
    scale: float


@dataclass(frozen=True)
class Certificate:
    """The one reading that agrees, the nodes that are its output (latest first), and how far off it and the next best are."""

    reading: Reading
    matches: tuple[Match, ...]
    error: float
    runner_up: float


@dataclass(frozen=True)
class Disagreement:
    """No reading agrees, or more than one: at which node that showed, why, and how far off the best was."""

    node: fx.Node
    reason: str
    error: float


def certify(region: Region) -> Certificate | Disagreement | None:
    """Prove a region to be the gated delta rule, or say how it disagrees; none if its frontier has not the roles' sizes."""
    tried = list(readings(region))
    if not tried:
        return None
    draw = draw_alike(region)
    state = random_state(region)
    values = evaluate(region.nodes, {region.marked.state_in: state, **draw}, [*region.outputs, region.marked.final_state])
    errors, fits = _compare_first_tokens(region, tried, draw, state, values)
    if min(errors) >= AGREES and (more := list(lifted(region, tried))):
        tried += more
        errors, fits = _compare_first_tokens(region, tried, draw, state, values)
    best = min(range(len(tried)), key=errors.__getitem__)
    others = [error for error, other in zip(errors, tried, strict=True) if not _differ_in_eps_alone(tried[best], other)]
    runner_up = min(others, default=float("inf"))
    if errors[best] >= AGREES:
        return _disagreement(region, tried, errors, draw, state, values)
    if runner_up <= DISAGREES:
        return Disagreement(
            region.outputs[0],
            f"two readings agree, {_named(tried[best], region.outputs[0])} and another off by {runner_up:.1e}",
            runner_up,
        )
    return _certify_fully(region, tried[best], fits[best], runner_up)


def _differ_in_eps_alone(one: Reading, other: Reading) -> bool:
    # The constant of a norm hardly shows on keys of length one; the second run tells it by short keys.
    same = (one.roles, one.decay, one.corrects, one.lifts) == (other.roles, other.decay, other.corrects, other.lifts)
    return same and (one.norm_eps >= 0) == (other.norm_eps >= 0)


def _compare_first_tokens(
    region: Region,
    tried: list[Reading],
    draw: dict[fx.Node, Tensor],
    state: Tensor,
    values: dict[fx.Node, Tensor],
) -> tuple[list[float], list[list[Match]]]:
    """Compare the last row's last head over the first tokens; return each reading's error and agreeing outputs."""
    every = [operands(region, reading, draw, FIRST_TOKENS) for reading in tried]
    T = min(region.marked.sizes[1], FIRST_TOKENS)
    K = region.marked.sizes[4]
    q, k, v = (torch.stack([getattr(each, name)[0, :, 0] for each in every]) for name in ("q", "k", "v"))
    decay = torch.stack([each.decay[0, :, 0].expand(T, K) for each in every])
    beta = torch.stack([each.beta[0, :, 0] for each in every])
    corrects = torch.tensor([float(reading.corrects) for reading in tried]).to(q)
    expected, _ = literal_rule(q, k, v, decay, beta, state[-1, -1].expand(len(every), -1, -1), corrects)  # [X, T, V]
    errors, fits = [float("inf")] * len(every), [[] for _ in every]  # type: list[float], list[list[Match]]
    for node in region.outputs:
        for layout in layouts(region, node):
            got = by_layout(region.marked, values[node], layout)[-1, :T, -1]
            scale = (expected * got).sum((1, 2)) / expected.square().sum((1, 2))
            off = (got - scale[:, None, None] * expected).flatten(1).norm(dim=1) / got.norm()
            for i, error in enumerate(off.tolist()):
                if error < errors[i]:
                    errors[i] = error
                if error < AGREES:
                    fits[i].append(Match(node, layout, float(scale[i])))
    return errors, fits


def _certify_fully(region: Region, reading: Reading, fits: list[Match], runner_up: float) -> Certificate | Disagreement:
    final = region.marked.final_state
    matches, error = fits, 0.0
    for size in SIZES:
        draw, state = draw_roles(region, reading, size), size * random_state(region)
        values = evaluate(region.nodes, {region.marked.state_in: state, **draw}, [*(fit.node for fit in matches), final])
        output, end = _literal(region, operands(region, reading, draw), state, reading.corrects)
        state_error = relative_error(values[final], end)
        if not state_error < AGREES:
            reason = f"the outputs agree with the gated delta rule, but the state that is written is off by {state_error:.1e}"
            if size > 1:
                reason = (
                    f"a state of the size of {size:.0e} is not kept: it is off by {state_error:.1e}, so something bounds it"
                )
            return Disagreement(final, reason, state_error)
        off = [relative_error(by_layout(region.marked, values[fit.node], fit.layout), fit.scale * output) for fit in matches]
        if min(off) >= AGREES:
            reason = f"strong decays or large values tell it from the gated delta rule ({min(off):.1e})"
            return Disagreement(fits[-1].node, reason, min(off))
        matches = [fit for fit, each in zip(matches, off, strict=True) if each < AGREES]
        error = max(error, state_error, *(each for each in off if each < AGREES))
    return Certificate(reading, tuple(matches), error, runner_up)


def _disagreement(
    region: Region,
    tried: list[Reading],
    errors: list[float],
    draw: dict[fx.Node, Tensor],
    state: Tensor,
    values: dict[fx.Node, Tensor],
) -> Disagreement:
    likely = sorted(range(len(tried)), key=errors.__getitem__)
    departure = first_departure(region, [tried[i] for i in likely], draw, state)
    best = likely[0] if departure is None else next(i for i in likely if tried[i] is departure.reading)
    _, end = _literal(region, operands(region, tried[best], draw), state, tried[best].corrects)
    final = region.marked.final_state
    state_error = relative_error(values[final], end)
    follows = state_error < AGREES
    bends = None if follows else nonlinear_in_state(region)
    if bends is not None:
        operator = str(bends.target).removeprefix("aten.").split(".")[0]
        node, why = bends, f"The rule is linear in the state, and this {operator} of it is not. "
    elif departure is not None:
        node, why = departure.node, f"{departure.sentence[0].upper()}{departure.sentence[1:]}. "
    else:
        node, why = region.outputs[-1] if follows else final, ""
    closest = f"the closest reading ({_named(tried[best], node)}) is off by {errors[best]:.1e}"
    if follows:
        return Disagreement(
            node, f"the state follows the gated delta rule, but no output does. {why}T{closest[1:]}", errors[best]
        )
    reason = f"not the gated delta rule. {why}T{closest[1:]} in its outputs and {state_error:.1e} in its state"
    return Disagreement(node, reason, errors[best])


def _literal(region: Region, roles: Operands, state: Tensor, corrects: bool) -> tuple[Tensor, Tensor]:
    B, N, _, HV, K, V = region.marked.sizes
    q, k, v, decay = (x.transpose(1, 2).reshape(B * HV, N, -1) for x in (roles.q, roles.k, roles.v, roles.decay))
    beta = roles.beta.transpose(1, 2).reshape(B * HV, N)
    o, end = literal_rule(q, k, v, decay, beta, state.reshape(B * HV, K, V), beta.new_full((B * HV,), float(corrects)))
    return o.reshape(B, HV, N, V).transpose(1, 2), end.reshape(B, HV, K, V)


def _named(reading: Reading, beside: fx.Node) -> str:
    roles = ", ".join(f"{role} {node.name}{line_of(node, beside)}" for role, node in reading.roles.items())
    roles += f", decay as {reading.decay}" if "decay" in reading.roles else ""
    return roles if reading.corrects else f"{roles}, without a correction"


def layouts(region: Region, node: fx.Node) -> list[Layout]:
    """Return the orders of the axes ``B, N, HV, V`` that a node of as many elements may have, the plain order first."""
    B, N, _, HV, _, V = region.marked.sizes
    sizes, shape = (B, N, HV, V), tuple(node.meta["val"].shape)
    plain: list[Layout] = [(0, 1, 2, 3), (0, 2, 1, 3)]
    if len(shape) != 4:
        return plain
    orders: list[Layout] = [(a, b, c, d) for a, b, c, d in itertools.permutations(range(4))]
    fitting = [order for order in orders if tuple(sizes[axis] for axis in order) == shape]
    return fitting or plain


def by_layout(marked: MarkedState, value: Tensor, layout: Layout) -> Tensor:
    """Return an output's value as ``[B, N, HV, V]``."""
    B, N, _, HV, _, V = marked.sizes
    sizes = (B, N, HV, V)
    return value.reshape([sizes[axis] for axis in layout]).permute([layout.index(axis) for axis in range(4)])


__all__ = ["Certificate", "Disagreement", "Match", "Unlike", "by_layout", "certify", "heads_of", "layouts"]
