"""Every way in which the nodes at a region's frontier could be the roles of a gated delta rule.

B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from treewy_inductor.passes.lift_elementwise import Lift, lifts_of
from treewy_inductor.passes.literal_rule import normalized
from treewy_inductor.passes.propose_region import Region

aten = torch.ops.aten

ROLES = ("query", "key", "value", "decay", "beta")
NORMS = {aten.rsqrt.default, aten.sqrt.default, aten.linalg_vector_norm.default, aten.pow.Tensor_Scalar}


@dataclass(frozen=True)
class Reading:
    """One assignment of roles.

    Attributes:
        roles: role to frontier node; ``decay`` or ``beta`` may be missing, which means a decay of 1 or a beta of 1.
        decay: whether the decay's node holds its ``"log"`` or the decay ``"itself"``.
        norm_eps: what is added to the squared norms of query and key; negative if they are used as they come.
        corrects: whether the rule predicts the value before it writes; if not it is linear attention with a decay.
        lifts: for a decay or beta that the region makes of its node element by element, how.
    """

    roles: dict[str, fx.Node]
    decay: str
    norm_eps: float
    corrects: bool = True
    lifts: dict[str, Lift] = field(default_factory=dict)


@dataclass(frozen=True)
class Operands:
    """What a reading makes of a draw: ``q, k [B,N,HV,K]``, ``v [B,N,HV,V]``, ``decay [B,N,HV,K or 1]``, ``beta [B,N,HV]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


def readings(region: Region) -> Iterator[Reading]:
    """Enumerate the readings whose sizes fit; each node of the frontier plays exactly one role."""
    if not 3 <= len(region.frontier) <= 5:
        return
    norms = norm_constants(region.nodes)
    for roles in (ROLES, ROLES[:4], (*ROLES[:3], "beta"), ROLES[:3]):
        if len(roles) != len(region.frontier):
            continue
        for nodes in itertools.permutations(region.frontier):
            assigned = dict(zip(roles, nodes, strict=True))
            if not all(heads_of(region, role, node) for role, node in assigned.items()):
                continue
            if heads_of(region, "query", assigned["query"]) != heads_of(region, "key", assigned["key"]):
                continue
            for decay in ("log", "itself") if "decay" in assigned else ("none",):
                for norm_eps in (-1.0, *norms):
                    yield Reading(assigned, decay, norm_eps)
                if decay != "none":
                    yield Reading(assigned, decay, -1.0, corrects=False)


def lifted(region: Region, plain: list[Reading]) -> Iterator[Reading]:
    """Enumerate the readings in which decay or beta are made of their nodes token by token inside the region."""
    lifts = {node: lifts_of(region, node) for node in region.frontier}
    for reading in plain:
        roles: list[str] = [role for role in ("decay", "beta") if role in reading.roles]
        for chosen in itertools.product(*([None, *lifts[reading.roles[role]]] for role in roles)):
            taken: dict[str, Lift] = {role: lift for role, lift in zip(roles, chosen, strict=True) if lift is not None}
            if taken:
                yield replace(reading, lifts=taken)


def norm_constants(nodes: tuple[fx.Node, ...]) -> list[float]:
    """Return the small numbers that are added somewhere among nodes that also take a root: they may be a norm's."""
    if not any(node.target in NORMS for node in nodes):
        return []
    found = {0.0: None}
    for node in nodes:
        if node.target in (aten.add.Tensor, aten.add.Scalar):
            found.update({float(arg): None for arg in node.args if isinstance(arg, float | int) and 0 < arg < 0.1})
    return list(found)[-3:]


def heads_of(region: Region, role: str, node: fx.Node) -> int:
    """Return how many heads a node has if it plays a role, 0 if it has not the size for it."""
    B, N, _, HV, K, V = region.marked.sizes
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return 0
    per_token = math.prod(value.shape) // (B * N)
    if role in ("query", "key"):
        heads = per_token // K
        return heads if per_token % K == 0 and heads and HV % heads == 0 else 0
    sizes = {"value": (HV * V,), "decay": (HV, HV * K), "beta": (HV,)}[role]
    return HV if per_token in sizes else 0


def by_token(region: Region, node: fx.Node, value: Tensor, heads: int) -> Tensor:
    """Return a node's value as ``[B, N, heads, D]``."""
    B, N = region.marked.sizes[:2]
    axis = region.labels[node]
    assert isinstance(axis, int)
    if axis == 0 and not (value.dim() > 1 and value.shape[1] == B and B > 1):
        value, axis = value.unsqueeze(0), 1
    return value.movedim(axis, 1).reshape(B, N, heads, -1)


def operands(region: Region, reading: Reading, draw: dict[fx.Node, Tensor], first_tokens: int | None = None) -> Operands:
    """Lay a draw out as a reading takes it, keys and queries repeated for each head of their group.

    Args:
        first_tokens: lay out just so many tokens of the last row's last head; all of it by default.
    """
    B, N, _, HV, _, _ = region.marked.sizes
    parts = {role: by_token(region, node, draw[node], heads_of(region, role, node)) for role, node in reading.roles.items()}
    parts |= {role: lift.apply(parts[role]) for role, lift in reading.lifts.items()}
    if first_tokens is not None:
        B, N, HV = 1, min(N, first_tokens), 1
        parts = {role: part[-1:, :N, -1:] for role, part in parts.items()}
    q, k = (normalized(parts[role], reading.norm_eps) for role in ("query", "key"))
    ones = parts["value"].new_ones(B, N, HV, 1)
    decay = parts.get("decay", ones)
    return Operands(
        q.repeat_interleave(HV // q.shape[2], 2),
        k.repeat_interleave(HV // k.shape[2], 2),
        parts["value"],
        decay.exp() if reading.decay == "log" else decay,
        parts.get("beta", ones)[..., 0],
    )
