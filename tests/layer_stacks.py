"""Small stacks of equal layers that keep results in buffers, run with a rewrite of their graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from treewy_inductor.backend import treewy

WIDTH, ROWS = 6, 3
INPUT = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A residual block that keeps its product in a buffer, as a cache's layer does."""

    def __init__(self, width: int = 2 * WIDTH, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.kept: Tensor
        self.register_buffer("kept", torch.zeros(ROWS, width))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        product = torch.nn.functional.silu(self.up(normed))
        self.kept.copy_(product)
        return x + torch.nn.functional.dropout(self.down(product), self.drop)


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.tanh()


class Positions(nn.Module):
    """A block whose rows go into a longer buffer that it then reads: an update in place between two runs of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()
        self.rows: Tensor
        self.register_buffer("rows", torch.zeros(2 * ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.rows.index_copy_(0, torch.arange(1, ROWS + 1), self.first(x))
        return self.last(x + self.rows.sum(0))


def run_rewritten(
    module: nn.Module, rewrite: Callable[[fx.Graph], Any], codegen: bool = False
) -> tuple[Tensor, list[Tensor], Any, fx.GraphModule]:
    """Return the output, every buffer afterwards, what ``rewrite`` returned, and the graph that it left."""
    seen: list[tuple[Any, fx.GraphModule]] = []

    def keep(graph: fx.Graph) -> None:
        seen.append((rewrite(graph), graph.owning_module))  # type: ignore[arg-type]

    options = {"treewy.codegen": codegen, "force_disable_caches": True, "joint_custom_pre_pass": keep}
    torch._dynamo.reset()
    for buffer in module.buffers():
        buffer.zero_()
    with torch.no_grad():
        output = torch.compile(module, backend=treewy, fullgraph=True, dynamic=False, options=options)(INPUT)
    return output, [buffer.clone() for buffer in module.buffers()], *seen[0]
