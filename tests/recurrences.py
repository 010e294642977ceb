"""What the written-out recurrences of these tests share: projections, and the protocol of a cache.

    B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim   D width of the layer's input

A user's layer reads a state, runs its recurrence over N tokens, and writes the state back, as a transformers layer does
with its cache. :class:`ChainSlot` is that cache for an ordinary sequence. :class:`TreeSlot` is the same cache for a draft
tree: it knows no model family and calls nothing but the markers, so a recurrence is tested alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from treewy_inductor import ops
from treewy_inductor.encoding import TreeEncoding

WIDTH = 5


class ChainSlot:
    """The state of an ordinary sequence, ``[B, HV, K, V]``: what is read is what was written last."""

    def __init__(self, state: Tensor) -> None:
        self.state = state

    def read(self) -> Tensor:
        """Return the state before the first token."""
        return self.state

    def write(self, state: Tensor) -> None:
        """Keep the state after the last token."""
        self.state = state


class TreeSlot:
    """The state above a draft tree, and the buffers from which a commit rebuilds the accepted node's state."""

    def __init__(self, layer: Recurrence, state: Tensor, encoding: TreeEncoding, number: int = 0) -> None:
        B, HV, K, V = state.shape
        N = encoding.parents.shape[1]
        self.state, self.encoding, self.number = state, encoding, number
        self.pseudo_values = state.new_zeros(B, N, HV, V)
        self.keys = torch.zeros(B, N, layer.key_heads, K, dtype=layer.projection.weight.dtype)
        self.path_decay = state.new_zeros(B, N, HV)
        self.key_scale = state.new_zeros(B, N, layer.key_heads)

    def read(self) -> Tensor:
        """Mark where the recurrence takes its state."""
        tree = self.encoding
        return ops.state_in(self.state, tree.ancestors, tree.order, tree.internal, tree.height, self.number, 0)

    def write(self, state: Tensor) -> None:
        """Mark where the recurrence leaves its state, and keep what a commit needs."""
        buffers = self.pseudo_values, self.keys, self.path_decay, self.key_scale
        for buffer, new in zip(buffers, ops.state_out(state, *buffers, self.number, 0), strict=True):
            buffer.copy_(new)


class Recurrence(nn.Module):
    """A layer whose :meth:`recur` is written out by a subclass: ``[B, N, D]`` in, ``[B, N, D]`` out."""

    key_heads, value_heads, key_dim, value_dim = 2, 2, 4, 6

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        HK, HV, K, V = self.key_heads, self.value_heads, self.key_dim, self.value_dim
        self.sizes = (HK * K, HK * K, HV * V, HV, HV)
        with _seeded():
            self.projection = nn.Linear(WIDTH, sum(self.sizes), bias=False, dtype=dtype)
            self.output = nn.Linear(HV * V, WIDTH, bias=False, dtype=dtype)
            self.extra_parameters()
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.6)

    def extra_parameters(self) -> None:
        """Make the parameters only this recurrence has."""

    def forward(self, hidden: Tensor, slot: ChainSlot | TreeSlot) -> Tensor:
        q, k, v, a, b = self.projection(hidden).split(self.sizes, -1)
        q, k = (x.unflatten(-1, (self.key_heads, self.key_dim)) for x in (q, k))
        v = v.unflatten(-1, (self.value_heads, self.value_dim))
        o, state = self.recur(q, k, v, a, b, slot.read())
        slot.write(state)
        return self.output(self.after(o).flatten(2).to(hidden.dtype))

    def after(self, o: Tensor) -> Tensor:
        """Return what becomes of the outputs ``[B, N, HV, V]`` before they are projected."""
        return o

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        """Run the recurrence over N tokens.

        Args:
            q, k: ``[B, N, HK, K]`` as projected.
            v: ``[B, N, HV, V]``.
            a, b: ``[B, N, HV]``, any real number: what decay and beta are made of.
            S: ``[B, HV, K, V]`` before the first token.

        Returns:
            Outputs ``[B, N, HV, V]`` and the state after the last token.
        """
        raise NotImplementedError


def unit(x: Tensor) -> Tensor:
    """Scale the last dimension to length one."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def log_decay_of(a: Tensor) -> Tensor:
    """Return a log decay, at most 0, from any real number."""
    return -nn.functional.softplus(a)


@contextmanager
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield
