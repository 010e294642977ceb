"""Find the gated delta rules of a graph between the markers of a TreeCache, and prove each.

A region is proposed by structure, accepted only after it was run against the literal rule, and then cut as near to the
graph's inputs as can be proven. Equal regions, such as those of a model's layers, are proven once. Nothing is changed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from torch import fx

from treewy_inductor import compat
from treewy_inductor.passes.certify import Certificate, Disagreement, Match, certify
from treewy_inductor.passes.deepen_cut import Cut, deepen
from treewy_inductor.passes.find_rounding import rounding_before
from treewy_inductor.passes.lift_elementwise import Lift
from treewy_inductor.passes.marked_state import MarkedState, marked_states
from treewy_inductor.passes.misfit_of_cache import is_vector, misfit
from treewy_inductor.passes.propose_region import Region, Unlike, propose_regions
from treewy_inductor.passes.readings import ROLES, heads_of
from treewy_inductor.passes.region_key import Neighbourhood, neighbourhood
from treewy_inductor.passes.token_axis import Kind, Label, label_tokens, shape_of
from treewy_inductor.records import Proven, Refused, module_of, refuse, source_of

log = logging.getLogger(__name__)

KIND, WITHOUT_CORRECTION = "gated_delta", "linear_attention"


@dataclass(frozen=True)
class Recurrence:
    """A proven recurrence: what its op is to read, and which node its output replaces.

    Attributes:
        cuts: role to cut; ``decay`` and ``beta`` may be missing.
        decay: whether the decay's cut holds its ``"log"`` or the decay ``"itself"``; ``"none"`` without one.
        output: the node to be replaced, its axes and its factor to the op's output with a scale of 1.
        nodes: what the op replaces.
        lifts: for a decay or beta that is made of its cut element by element, how.
        corrects: whether it is the gated delta rule; if not, it is linear attention with a decay.
    """

    marked: MarkedState
    cuts: dict[str, Cut]
    decay: str
    norm_eps: float
    scale: float
    output: Match
    nodes: tuple[fx.Node, ...]
    lifts: dict[str, Lift]
    corrects: bool
    record: Proven


def recognize(graph: fx.Graph) -> list[Recurrence | Refused]:
    """Prove each recurrence between markers of a graph of functional ATen operators, or say why not."""
    pairs, alone = marked_states(graph)
    found: list[Recurrence | Refused] = []
    order = _places_of_live_nodes(graph)
    labels: dict[tuple[int, int], dict[fx.Node, Label]] = {}
    proven: dict[str, tuple[Neighbourhood, Recurrence | Refused]] = {}
    for marked in pairs:
        sizes = marked.sizes
        if not all(isinstance(size, int) for size in sizes):
            found.append(_refused(marked, marked.state_in, "its sizes are symbolic: compile with dynamic=False"))
            continue
        if sizes[:2] not in labels:
            labels[sizes[:2]] = label_tokens(graph, *sizes[:2])
        around = neighbourhood(marked, labels[sizes[:2]], order)
        if around.key in proven:
            before, result = proven[around.key]
            found.append(_taken_over(result, marked, dict(zip(before.nodes, around.nodes, strict=True))))
            continue
        with compat.without_fake_tensors():
            result = _prove(marked, labels[sizes[:2]], order)
        proven[around.key] = around, result
        found.append(result)
    for node in alone:
        reason = "the state is read and not written, or written and not read, or read twice"
        layer, slot = node.args[-2:]
        found.append(refuse(KIND, int(str(layer)), int(str(slot)), node, reason))
    return found


def _places_of_live_nodes(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the place of each node that something comes of; a node that nothing reads does not count as a reader."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in live or node.op in ("output", "placeholder") or node.is_impure():
            live.add(node)
            live.update(node.all_input_nodes)
    return {node: place for place, node in enumerate(graph.nodes) if node in live}


def _prove(marked: MarkedState, labels: dict[fx.Node, Label], order: dict[fx.Node, int]) -> Recurrence | Refused:
    started = time.perf_counter()
    closest: Disagreement | None = None
    last_region = None
    try:
        for region in propose_regions(marked, labels, order):
            result = certify(region)
            log.debug("layer %d: frontier %s: %s", marked.layer, region.frontier, result)
            if isinstance(result, Certificate):
                return _conclude(region, result, order, started)
            if result is None:
                last_region = region
            elif closest is None or result.error < closest.error:
                closest = result
    except Unlike as unlike:
        return _refused(marked, unlike.node, unlike.reason)
    if closest is not None:
        return _refused(marked, closest.node, closest.reason)
    shapes = ""
    if last_region is not None:
        shapes = ", ".join(f"{node.name} {list(shape_of(node) or ())}" for node in last_region.frontier)
    B, N, HK, HV, K, V = marked.sizes
    reason = (
        f"what it computes from its tokens does not look like query, key, value, decay and beta of {B} rows, {N} nodes, "
        f"{HK} key and {HV} value heads, {K} key and {V} value channels: found {shapes or 'nothing'}"
    )
    mixing = None if last_region is None else _mixing(last_region)
    if mixing is not None:
        return _refused(marked, mixing, f"{reason}. Tokens already meet here, before any of them meets the state")
    return _refused(marked, marked.final_state, reason)


def _mixing(region: Region) -> fx.Node | None:
    """Return the first node that mixes the tokens of what at the frontier has no role's size, none if all have one."""
    reached = {node for node in region.frontier if not any(heads_of(region, role, node) for role in ROLES)}
    for node in region.nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            if region.labels[node] is Kind.MIXED:
                return node
            reached.add(node)
    return None


def _conclude(region: Region, certificate: Certificate, order: dict[fx.Node, int], started: float) -> Recurrence | Refused:
    marked, reading = region.marked, certificate.reading
    outputs = [match for match in _preferred(certificate.matches) if not _state_escapes(region, match.node, order)]
    if not outputs:
        reason = "the state or an output is also read outside the recurrence, so the chain would have to be computed as well"
        return _refused(marked, certificate.matches[0].node, reason)
    output = outputs[0]
    rounding = rounding_before([marked.final_state, output.node], region.nodes, [match.node for match in certificate.matches])
    if rounding is not None:
        dtype = str(rounding.meta["val"].dtype).removeprefix("torch.")
        return _refused(marked, rounding, f"it rounds to {dtype} inside the recurrence, which is kept in float32 on a tree")
    cuts = deepen(region, reading, order)
    reason = misfit(marked, cuts, reading.corrects)
    if reason:
        return _refused(marked, cuts["key"].node, reason)
    norm_eps = max(reading.norm_eps, cuts["key"].norm_eps)
    scale = _literal_scale(output.scale * cuts["query"].scale, marked.sizes[4])
    decay = "log" if reading.decay == "itself" and cuts["decay"].takes_exp else reading.decay
    source, code = source_of(marked.final_state)
    # What a lift is made of is no decay yet.
    names = {"decay": "log_decay"} if decay == "log" and "decay" not in reading.lifts else {}
    record = Proven(
        kind=KIND if reading.corrects else WITHOUT_CORRECTION,
        layer=marked.layer,
        slot=marked.slot,
        roles={names.get(role, role): cut.node.name for role, cut in cuts.items()} | {"output": output.node.name},
        facts={
            "scale": scale,
            "norm_eps": norm_eps,
            "decay": decay,
            "vector_decay": "decay" in cuts and is_vector(marked, cuts["decay"]),
            "key_heads": cuts["key"].heads,
            "value_heads": marked.sizes[3],
            "key_dtype": str(cuts["key"].node.meta["val"].dtype).removeprefix("torch."),
            "out_dtype": str(output.node.meta["val"].dtype).removeprefix("torch."),
        },
        error=certificate.error,
        runner_up=certificate.runner_up,
        nodes_before=len(region.nodes) + 2,
        nodes_after=1,
        source=source,
        code=code,
        module=module_of(marked.final_state),
        seconds=time.perf_counter() - started,
        proven_by=marked.layer,
    )
    return Recurrence(marked, cuts, decay, norm_eps, scale, output, region.nodes, reading.lifts, reading.corrects, record)


def _preferred(matches: tuple[Match, ...]) -> list[Match]:
    """Order outputs: the model's own dtype before what was cast up from it, the op's layout before others, late first."""
    half = [match for match in matches if match.node.meta["val"].dtype.itemsize == 2]
    if half:
        matches = tuple(half) + tuple(match for match in matches if match not in half)
    is_plain = [match for match in matches if match.layout == (0, 1, 2, 3) and match.node.meta["val"].dim() == 4]
    best_dtype = matches[0].node.meta["val"].dtype
    first = [match for match in is_plain if match.node.meta["val"].dtype == best_dtype]
    return first + [match for match in matches if match not in first]


def _state_escapes(region: Region, output: fx.Node, order: dict[fx.Node, int]) -> bool:
    inside = {*region.nodes, region.marked.state_in}
    seen, todo = set(), [region.marked.state_in]
    while todo:
        for user in todo.pop().users:
            if user in seen or user is output or user is region.marked.state_out or user not in order:
                continue
            if user not in inside:
                return True
            seen.add(user)
            todo.append(user)
    return False


def _literal_scale(scale: float, K: int) -> float:
    """Return the number that a fitted scale must have been written as."""
    return next((known for known in (1.0, K**-0.5) if abs(scale - known) < 1e-12 * known), scale)


def _refused(marked: MarkedState, node: fx.Node, reason: str) -> Refused:
    return refuse(KIND, marked.layer, marked.slot, node, reason)


def _taken_over(result: Recurrence | Refused, marked: MarkedState, counterpart: dict[fx.Node, fx.Node]) -> Recurrence | Refused:
    """Return for one layer what was found for an equal one."""
    if isinstance(result, Refused):
        node = next((theirs for ours, theirs in counterpart.items() if ours.name == result.node), marked.final_state)
        return _refused(marked, node, result.reason)
    cuts = {role: replace(cut, node=counterpart[cut.node]) for role, cut in result.cuts.items()}
    output = replace(result.output, node=counterpart[result.output.node])
    source, code = source_of(marked.final_state)
    by_name = {ours.name: theirs.name for ours, theirs in counterpart.items()}
    record = replace(
        result.record,
        layer=marked.layer,
        slot=marked.slot,
        roles={role: by_name[name] for role, name in result.record.roles.items()},
        source=source,
        code=code,
        module=module_of(marked.final_state),
        seconds=0.0,
    )
    nodes = tuple(counterpart[node] for node in result.nodes)
    lifts = {
        role: Lift(counterpart[lift.token], tuple(counterpart[node] for node in lift.nodes), counterpart[lift.result])
        for role, lift in result.lifts.items()
    }
    return replace(result, marked=marked, cuts=cuts, output=output, nodes=nodes, lifts=lifts, record=record)
