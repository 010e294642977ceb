"""The prediction layer's drafts without the host: trees of one shape, drafted and read back inside a step's CUDA graph.

Between two steps it keeps, per row, the layer's keys and values of the committed tokens and the root's m. A step's graph then

    draft   takes the best tokens after the root's m, reads each level of the tree but the last, and takes the best after it
    take    reads the accepted tokens with the model's own hidden states, which leaves the next root's m

What mtp_drafter.py says of places, and of m and h, holds here too; a row's drafted nodes stand behind its tokens and are
overwritten by the next step.

    B rows   T tokens of one call   S places   H heads   D hidden size   M nodes of a tree   U nodes that are read
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treewy_inductor.drafting import DraftRequest
from treewy_inductor.models.multi_token_prediction import MultiTokenPrediction
from treewy_inductor.models.ragged_keys_values import RaggedKeysValues
from treewy_inductor.tree import DraftTree

if TYPE_CHECKING:
    from treewy_inductor.models.mtp_drafter import MtpDrafter


class _AllRows:
    """Keys and values of all rows in buffers that stay: answers an attention layer's ``update`` without copying them.

    Args:
        keys, values: ``[B, H, S, dim]``.
        places: ``[B, T]`` int64, where this call's tokens stand.
    """

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        self.keys, self.values, self.places = keys, values, places

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
        self.keys[rows, :, self.places] = keys.transpose(1, 2)
        self.values[rows, :, self.places] = values.transpose(1, 2)
        return self.keys, self.values


def _draft(
    prediction: MultiTokenPrediction,
    keys: Tensor,
    values: Tensor,
    root: Tensor,
    roots: Tensor,
    lengths: Tensor,
    first: Tensor,
    widths: Sequence[int],
    is_seen: Sequence[Tensor],
) -> Tensor:
    """Return the trees' tokens ``[B, M]``.

    Args:
        root: ``[B, D]``, m of each root; roots: ``[B]`` int64, its token; lengths: ``[B]`` int64, tokens before it.
        first: ``[B]`` int64, the first place of a token that is read behind a state.
        is_seen: per level that is read, ``[T, U]`` bool: which of the nodes read so far, itself included, are on a node's path.
    """
    outputs, tokens, used = root[:, None], [roots[:, None]], 0
    place = torch.arange(keys.shape[2], device=keys.device)
    behind = place - (lengths[:, None] + 1)  # [B, S], counted from the first place behind the root's
    is_committed = (behind < 0) & (place >= torch.minimum(lengths, first)[:, None])
    for level, width in enumerate(widths):
        best = prediction.logits(outputs).topk(width, dim=-1).indices.flatten(1)
        tokens.append(best)
        if level + 1 == len(widths):
            break
        count, seen = best.shape[1], is_seen[level]
        is_above = seen[:, behind.clamp(0, seen.shape[1] - 1)].transpose(0, 1)  # [B, T, S]
        is_node = (behind >= 0) & (behind < seen.shape[1])
        mask = is_committed[:, None] | (is_node[:, None] & is_above)
        places = lengths[:, None] + 1 + used + torch.arange(count, device=keys.device)
        positions = (lengths[:, None] + 1 + level).expand(-1, count)
        stored = _AllRows(keys, values, places)
        outputs = prediction(best, outputs.repeat_interleave(width, 1), positions, mask[:, None], stored)
        used += count
    return torch.cat(tokens, 1)


def _take(
    prediction: MultiTokenPrediction,
    keys: Tensor,
    values: Tensor,
    root: Tensor,
    hidden: Tensor,
    path: Tensor,
    emitted: Tensor,
    kept: Tensor,
    lengths: Tensor,
    first: Tensor,
) -> None:
    """Store keys and values of the tokens that hold and put the new root's m into ``root``; see :class:`CapturedDrafting`."""
    count = emitted.shape[1]
    node = path[:, :count].clamp(min=0).long()
    states = hidden.gather(1, node[..., None].expand(-1, -1, hidden.shape[2]))
    places = (lengths - kept)[:, None] + 1 + torch.arange(count, device=keys.device)
    place = torch.arange(keys.shape[2], device=keys.device)
    mask = (place <= places[..., None]) & (place >= first[:, None, None])
    outputs = prediction(emitted, states, places, mask[:, None], _AllRows(keys, values, places))
    last = outputs.gather(1, (kept - 1).clamp(min=0)[:, None, None].expand(-1, 1, outputs.shape[2]))[:, 0]
    root.copy_(torch.where(kept[:, None] > 0, last, root))


class MtpOnDevice:
    """See the module and :class:`treewy_inductor.drafting.CapturedDrafting`.

    Args:
        drafter: whose layer drafts; it reads the prompts.
        rows: B.
        places: most tokens of a row, a tree behind them included.
        widths: of every tree.
        compiled: whether Inductor compiles both functions.
    """

    def __init__(self, drafter: MtpDrafter, rows: int, places: int, widths: Sequence[int], compiled: bool = True) -> None:
        self._drafter, self._prediction, self._widths = drafter, drafter.prediction, tuple(widths)
        weight = self._prediction.fc.weight
        shape = DraftTree.from_widths(widths)
        self.parents = torch.tensor(shape.parents, dtype=torch.int32, device=weight.device)
        self._levels = len(self._widths) + 1
        # Kernels of masked attention want rows of the mask to be aligned.
        self._size = -(-places // 64) * 64
        self._keys, self._values = self._prediction.empty_keys_values(rows, self._size)
        self._root = weight.new_zeros(rows, weight.shape[0])
        self._first = torch.ones(rows, dtype=torch.int64, device=weight.device)
        self._is_seen = _paths_by_level(shape, weight.device)
        self._draft = _compiled(_draft) if compiled else _draft
        self._take = _compiled(_take) if compiled else _take

    @torch.no_grad()
    def begin(self, request: DraftRequest) -> None:
        # What an earlier text left is masked, but a NaN among it would still reach the softmax's sums.
        self._keys.zero_()
        self._values.zero_()
        self._drafter.begin(len(request.rows))
        self._drafter.stored = RaggedKeysValues(self._keys, self._values)
        # A row that does not run must not look behind what it holds: a softmax over nothing is NaN.
        self._first.fill_(1)
        rows = torch.tensor(request.rows, device=self._root.device)
        self._root[rows] = self._drafter.read_accepted(request)
        self._first[rows] = torch.tensor([self._drafter.first[row] for row in request.rows], device=rows.device)

    @torch.no_grad()
    def draft(self, roots: Tensor, lengths: Tensor) -> Tensor:
        held = self._keys, self._values, self._root
        return self._draft(self._prediction, *held, roots, lengths, self._first, self._widths, self._is_seen)

    @torch.no_grad()
    def take(self, hidden: Tensor, path: Tensor, emitted: Tensor, kept: Tensor, lengths: Tensor) -> None:
        emitted = emitted[:, : self._levels].clamp(min=0)
        held = self._keys, self._values, self._root
        self._take(self._prediction, *held, hidden, path, emitted, kept, lengths, self._first)


def _paths_by_level(shape: DraftTree, device: torch.device) -> list[Tensor]:
    """Return for each level that is read the ``[T, U]`` bool that :func:`_draft` takes."""
    deepest, found = max(shape.depths), []
    for level in range(1, deepest):
        nodes = [t for t, depth in enumerate(shape.depths) if depth == level]
        # Node t is the t-th that is read, less the root.
        paths = [set(shape.path_to(t)) for t in nodes]
        rows = [[t in path for t in range(1, nodes[-1] + 1)] for path in paths]
        found.append(torch.tensor(rows, dtype=torch.bool, device=device))
    return found


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Dynamo counts recompiles per code object and gives up after eight; each size and model has an object of its own.
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, fullgraph=True, dynamic=False)
