"""Inputs of the tree kernels at the shapes of a model, and their errors against the reference in float64.

Strides are those a model gives: query, key and value are views of one projection, the state has keys innermost, and the
inputs lie far enough apart that a round over all copies of a case does not fit the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treewy_inductor import reference, reference_replay
from treewy_inductor.encoding import derive
from treewy_inductor.tree import DraftTree

TREES = {
    "chain4": (1, 1, 1),
    "w222": (2, 2, 2),
    "w333": (3, 3, 3),
}
# What a round over all copies must exceed: an H200's L2 is 60 MB.
ROUND_BYTES = 256 << 20


@dataclass(frozen=True)
class Shape:
    """Heads and dims of a layer: HK key heads, GROUPS value heads each, K key dim, V value dim."""

    HK: int = 16
    groups: int = 2
    K: int = 128
    V: int = 128
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32

    @property
    def HV(self) -> int:
        return self.HK * self.groups

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's state."""
        return self.HV * self.K * self.V * self.state_dtype.itemsize


def tree_parents(name: str) -> list[int]:
    """Return the parents of one of ``TREES``, or of a tree of so many nodes:

    "chain<n>"; "wide<n>", three children a node, level by level; "leafy<n>", where at most 16 have children; "random<n>".
    """
    if name in TREES:
        return list(DraftTree.from_widths(TREES[name]).parents)
    kind, nodes = name.rstrip("0123456789"), int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))
    generator = torch.Generator().manual_seed(nodes)
    parent = {
        "chain": lambda t: t - 1,
        "wide": lambda t: (t - 1) // 3,
        "leafy": lambda t: (t - 1) // 2 if t < 16 else t % 16,
        "random": lambda t: int(torch.randint(t, (), generator=generator)),
    }[kind]
    return [-1, *map(parent, range(1, nodes))]


def arguments(parents: Sequence[int] | Tensor, batch: int, shape: Shape, seed: int = 0, device: str = "cuda") -> tuple:
    """Return the arguments of treewy::tree_gated_delta; inert nodes hold NaN."""
    links = torch.as_tensor(parents, dtype=torch.int32, device=device).expand(batch, -1)
    N, HK, HV, K, V = links.shape[1], shape.HK, shape.HV, shape.K, shape.V
    torch.manual_seed(seed)
    mixed = torch.randn(batch, N, 2 * HK * K + HV * V, device=device, dtype=shape.dtype)
    log_decay = -2 * torch.rand(batch, N, HV, device=device)
    beta = torch.rand(batch, N, HV, device=device, dtype=shape.dtype)
    for x in (mixed, log_decay, beta):
        x[links == -2] = torch.nan
    query, key, value = mixed.split((HK * K, HK * K, HV * V), -1)
    state = 0.3 * torch.randn(batch, HV, V, K, device=device).to(shape.state_dtype)
    ancestors, _, _, order, internal, height = derive(links.contiguous(), 4)
    heads = (query.unflatten(-1, (HK, K)), key.unflatten(-1, (HK, K)), value.unflatten(-1, (HV, V)))
    tree = (ancestors, order, internal, height)
    return (*heads, log_decay, beta, state.transpose(2, 3), *tree, K**-0.5, 1e-6, shape.dtype)


def copies(batch: int, shape: Shape, states: int = 1) -> int:
    """Return how many copies of a case of ``states`` states a row exceed the L2 cache."""
    return max(1, min(64, -(-ROUND_BYTES // (batch * states * shape.state_bytes))))


def accepted_trunk(case: tuple, length: int, slots: int) -> tuple[Tensor, ...]:
    """Return a trunk of ``length`` nodes accepted last, as a verification of ``case`` leaves them; NaN in free slots."""
    key, value = case[1:3]
    B, HK, K = key.shape[0], *key.shape[2:]
    HV, V = value.shape[2:]
    keys = torch.randn(B, slots, HK, K, dtype=key.dtype, device=key.device)
    scale = torch.rsqrt(keys.float().square().sum(-1) + case[11])
    values = 0.5 * torch.randn(B, slots, HV, V, device=key.device)
    decay = -torch.rand(B, slots, HV, device=key.device).cumsum(1)
    for tensor in (keys, scale, values, decay):
        tensor[:, length:] = torch.nan
    return keys, scale, values, decay, torch.full((B,), length, dtype=torch.int32, device=key.device)


def in_float64(compute: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], rows: int = 16) -> tuple[Tensor, ...]:
    """Return what ``compute`` gives of ``tensors``, the floats among them in float64, ``rows`` batch rows at a time."""
    parts = []
    for start in range(0, tensors[0].shape[0], rows):
        part = [x[start : start + rows] for x in tensors]
        parts.append(compute(*(x.double() if x.is_floating_point() else x for x in part)))
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def float64_results(arguments: tuple, trunk: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
    """Return the four results of the reference in float64; below a ``trunk`` if given."""
    verify = reference_replay.tree_gated_delta_trunk if trunk else reference.tree_gated_delta
    return in_float64(lambda *wide: verify(*wide, *arguments[10:12], torch.float64), [*arguments[:10], *trunk])


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Return ``|result - exact| / |exact|``, NaN if any element is; 0 where both are all zero."""
    difference = (result.double() - exact).norm()
    return float(difference / exact.norm()) if float(exact.norm()) else float(difference)
