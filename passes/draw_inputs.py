"""Draw the inputs that a proposed region is run on, in float64 and seeded.

B batch   N nodes   HV value heads   K key dim   V value dim
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from treewy_inductor.passes.propose_region import Region
from treewy_inductor.passes.readings import Reading


def draw_alike(region: Region) -> dict[fx.Node, Tensor]:
    """Draw what stands at the frontier so that each node can play any role of its size."""
    generator = torch.Generator().manual_seed(0)
    B, N, _, HV, K, V = region.marked.sizes
    draw = {}
    for node in region.frontier:
        value = node.meta["val"]
        if value.numel() == B * N * HV and min(K, V) > 1:
            # Small and positive: a decay, its logarithm and a beta alike can hold it.
            drawn = 0.02 + min(0.3, 20 / N) * torch.rand(value.shape, generator=generator, dtype=torch.float64)
        else:
            drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64) / K**0.5
        draw[node] = drawn.to(value.device)
    return draw


def draw_roles(region: Region, reading: Reading, size: float) -> dict[fx.Node, Tensor]:
    """Draw what the roles of a reading may hold, at its strongest; ``size`` is that of the values."""
    generator = torch.Generator().manual_seed(1)
    draw = {}
    for role, node in reading.roles.items():
        value = node.meta["val"]
        uniform = torch.rand(value.shape, generator=generator, dtype=torch.float64)
        normal = torch.randn(value.shape, generator=generator, dtype=torch.float64) / region.marked.sizes[4] ** 0.5
        if role in reading.lifts:
            drawn = 4 * normal * region.marked.sizes[4] ** 0.5
        elif role == "decay":
            drawn = -8 * uniform**4 - 1e-3
            drawn = drawn.exp() if reading.decay == "itself" else drawn
        elif role == "beta":
            drawn = 1.9 * uniform
        elif reading.norm_eps >= 0 and role in ("query", "key"):
            drawn = normal * 10 ** (4 * torch.rand(value.shape[:2], generator=generator, dtype=torch.float64) - 3).reshape(
                *value.shape[:2], *[1] * (value.dim() - 2)
            )
        else:
            drawn = size * normal if role == "value" else normal
        draw[node] = drawn.to(value.device)
    return draw


def random_state(region: Region) -> Tensor:
    """Draw the state before the first token."""
    value = region.marked.state_in.meta["val"]
    generator = torch.Generator().manual_seed(2)
    return torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
