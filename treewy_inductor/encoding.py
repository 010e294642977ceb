"""The static tensors of a draft tree that every layer reads, derived on the device from its parents.

    parents    [B, N] int32         -1 at a root, -2 at an inert node (padding: no ancestor, not its own, outputs zero)
    ancestors  [B, N, W] int64      bit i % 64 of word i // 64 of row t: node i is node t or above it
    depth      [B, N] int32         0 at a root, -1 at an inert node
    window     [B, N, K-1] int32    the first K-1 ancestors, nearest first; -1 the last committed token, -2 the one before
    order      [B, N] int32         slot -> node: nodes with children, then leaves, then inert ones, each ascending
    internal   [B] int32            how many nodes have children
    height     [B] int32            levels of the tree: G ** height == 0

    B batch   N nodes   W = ceil(N / 64) words   K kernel of the short convolution

The tensors keep their addresses: another tree is copied into them, so a captured CUDA graph replays with it and nothing is
compiled again. Deriving takes ceil(log2(N)) steps of pointer jumping (each node learns what the node it points to has
learnt, then points twice as far) and never waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor.compile_per_shape import compile_per_shape
from treewy_inductor.fixed_tensors import fix
from treewy_inductor.tree import INERT, MAX_NODES, ROOT, DraftTree

NO_WINDOW = -(2**30)


def derive(parents: Tensor, kernel_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``ancestors, depth, window, order, internal, height`` of ``parents`` ``[B, N]`` int32.

    The parents are trusted, since checking them would wait for the device: :class:`DraftTree` checks on the host.
    """
    nodes = parents.shape[1]
    node = torch.arange(nodes, device=parents.device)
    words = torch.arange(-(-nodes // 64), device=parents.device)
    is_real = parents != INERT

    own_bit = torch.where(node[:, None] // 64 == words, 1 << (node[:, None] % 64), 0)  # [N, W]
    ancestors = torch.where(is_real[..., None], own_bit, 0)
    depth = (parents >= 0).int()
    jump = parents.long()
    for _ in range((nodes - 1).bit_length()):
        points, target = jump >= 0, jump.clamp(min=0)
        above = ancestors.gather(1, target[..., None].expand_as(ancestors))
        ancestors = ancestors | torch.where(points[..., None], above, 0)
        depth = depth + torch.where(points, depth.gather(1, target), 0)
        jump = torch.where(points, jump.gather(1, target), jump)
    depth = torch.where(is_real, depth, -1)

    taps, reached = [], parents
    for _ in range(kernel_size - 1):
        taps.append(torch.where(is_real, reached, NO_WINDOW))
        higher = parents.gather(1, reached.clamp(min=0).long())
        reached = torch.where(reached >= 0, higher, reached - 1)
    window = torch.stack(taps, -1) if taps else parents.new_empty((*parents.shape, 0))

    is_internal = (parents[:, None, :] == node[:, None]).any(-1)
    rank_key = node + torch.where(is_internal, 0, torch.where(is_real, nodes, 2 * nodes))
    slot = (rank_key[:, None, :] < rank_key[:, :, None]).sum(-1)
    order = torch.where(slot[:, None, :] == node[:, None], node, 0).sum(-1)
    return ancestors, depth, window, order.int(), is_internal.sum(-1).int(), depth.amax(-1) + 1


def _refill(
    parents: Tensor,
    ancestors: Tensor,
    depth: Tensor,
    window: Tensor,
    order: Tensor,
    internal: Tensor,
    height: Tensor,
) -> None:
    derived = derive(parents, window.shape[2] + 1)
    for tensor, value in zip((ancestors, depth, window, order, internal, height), derived, strict=True):
        tensor.copy_(value)


_refill_compiled = compile_per_shape(_refill)


def attention_mask(lengths: Tensor, ancestors: Tensor, max_length: int) -> Tensor:
    """Return which key positions each node attends: the committed ones, its ancestors' and its own.

    Node i's key stands at position ``length + i`` of its row. An inert node attends position 0 alone: something, so that
    its softmax has no NaN, and its output is read by nobody.

    Args:
        lengths: ``[B]`` int64, committed positions of each row.
        ancestors: ``[B, N, W]`` int64.

    Returns:
        ``[B, 1, N, max_length]`` bool, true where attended.
    """
    nodes = ancestors.shape[1]
    position = torch.arange(max_length, device=ancestors.device)
    column = position - lengths[:, None]  # [B, max_length]
    is_draft = (column >= 0) & (column < nodes)
    bit_of = column.clamp(0, nodes - 1)
    words = ancestors.gather(2, (bit_of // 64)[:, None].expand(-1, nodes, -1))  # [B, N, max_length]
    is_above = (words >> (bit_of % 64)[:, None]) & 1 != 0
    is_inert = (ancestors == 0).all(-1)[..., None]
    seen = (column < 0)[:, None] | (is_draft[:, None] & is_above)
    return torch.where(is_inert, position == 0, seen)[:, None]


def _refill_mask(mask: Tensor, lengths: Tensor, ancestors: Tensor) -> None:
    mask.copy_(attention_mask(lengths, ancestors, mask.shape[3]))


_refill_mask_compiled = compile_per_shape(_refill_mask)


class TreeEncoding:
    """The tensors above for ``batch_size`` rows of ``max_nodes`` nodes, each row with its own tree; all inert at first.

    Args:
        kernel_size: of the model's short convolution; it sets how many ancestors ``window`` names.
        compiled: whether :meth:`fill` and :meth:`fill_mask` run as compiled code. By default they do on an accelerator,
            where they then are a few kernels that a CUDA graph can capture after one call, and not on the CPU, where
            compiling would take longer than all the trees of a short run.
    """

    def __init__(
        self,
        batch_size: int,
        max_nodes: int,
        *,
        kernel_size: int = 4,
        device: torch.device | str | None = None,
        compiled: bool | None = None,
    ) -> None:
        if not 1 <= max_nodes <= MAX_NODES:
            raise ValueError(f"max_nodes is {max_nodes}, expected 1 to {MAX_NODES}: draft fewer nodes")
        B, N = batch_size, max_nodes
        self.parents = torch.full((B, N), INERT, dtype=torch.int32, device=device)
        self.ancestors = self.parents.new_zeros((B, N, -(-N // 64)), dtype=torch.int64)
        self.depth = torch.full_like(self.parents, -1)
        self.window = self.parents.new_full((B, N, kernel_size - 1), NO_WINDOW)
        self.order = torch.arange(N, dtype=torch.int32, device=self.parents.device).repeat(B, 1)
        self.internal = self.parents.new_zeros(B)
        self.height = self.parents.new_zeros(B)
        self.compiled = self.parents.device.type != "cpu" if compiled is None else compiled
        fix(*self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, ``parents`` first; they are the same objects for the life of the encoding."""
        names = ("parents", "ancestors", "depth", "window", "order", "internal", "height")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, *trees: DraftTree, device: torch.device | str | None = None, kernel_size: int = 4) -> TreeEncoding:
        """Return the encoding of a batch of trees, a row each, as large as the largest of them."""
        encoding = cls(len(trees), max(map(len, trees)), kernel_size=kernel_size, device=device)
        return encoding.fill(torch.stack([tree.padded(encoding.parents.shape[1]) for tree in trees]))

    def fill(self, parents: Tensor) -> TreeEncoding:
        """Make all tensors describe ``parents`` ``[B, N]``, in place and without waiting for the device.

        The entries are trusted (:class:`DraftTree` checks on the host): each is smaller than its own index and is no
        inert node's index; -1 at a root; -2 at an inert node, which may stand anywhere.
        """
        if parents.shape != self.parents.shape:
            raise ValueError(
                f"parents is {list(parents.shape)} in an encoding of {list(self.parents.shape)}: pad each row with -2"
            )
        self.parents.copy_(parents, non_blocking=True)
        refill = _refill_compiled if self.compiled else _refill
        refill(*self.tensors().values())
        return self

    def positions(self, lengths: Tensor) -> Tensor:
        """Return each node's position ``[B, N]`` int64 after ``lengths`` ``[B]`` committed tokens; inert as a root."""
        return lengths[:, None] + self.depth.clamp(min=0)

    def fill_mask(self, mask: Tensor, lengths: Tensor) -> Tensor:
        """Write :func:`attention_mask` into ``mask`` ``[B, 1, N, max_length]`` bool and return it."""
        refill_mask = _refill_mask_compiled if self.compiled else _refill_mask
        refill_mask(mask, lengths, self.ancestors)
        return mask


__all__ = ["INERT", "NO_WINDOW", "ROOT", "TreeEncoding", "attention_mask", "derive"]
