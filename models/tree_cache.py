"""A cache of transformers in which the tokens of a forward form a tree, and one path of it is kept afterwards.

    cache.prefill(model, input_ids)          # the prompt, by the model's ordinary cached forward
    cache.set_tree(tree)                     # which node follows which, per row
    logits = step(**cache.inputs(tokens)).logits
    cache.commit(path)                       # the accepted nodes, all layers at once

Rows of a batch have their own lengths and trees. Every verification has exactly ``max_nodes`` tokens, inert ones included,
so that one compiled graph serves all trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from treewy_inductor.cache_buffers import CacheBuffers
from treewy_inductor.cache_snapshot import CacheSnapshot, put_rows, take_rows
from treewy_inductor.fixed_tensors import fix
from treewy_inductor.layer_shapes import LayerShape, LinearShape, SoftmaxShape
from treewy_inductor.models.cache_layers import TreeLinearLayer, TreeSoftmaxLayer
from treewy_inductor.models.exporting_branch import trace_the_ordinary_branch
from treewy_inductor.models.families import shapes_of_layers
from treewy_inductor.models.fla_rules import trace_through_fla
from treewy_inductor.models.prefill import prefill
from treewy_inductor.models.transformers_api import CACHE_KEYWORD, STATE_CACHE_KEYWORD
from treewy_inductor.models.tree_attention import NAME as TREE_ATTENTION
from treewy_inductor.models.tree_attention import pack_tree, register_attention
from treewy_inductor.tree import INERT, DraftTree

register_attention()


class TreeCache(CacheBuffers, Cache):
    """See the module; the buffers and their shapes are those of :class:`CacheBuffers`.

    Args:
        config: of the model, or of a multimodal model whose text part is meant.
        batch_size: rows.
        max_length: tokens that a row can hold; a verification needs ``length + max_nodes <= max_length``.
        max_nodes: tokens of every verification, 2 to 256; smaller trees are padded with inert nodes.
        dtype: of the model; by default the configuration's.
        device: of the model; by default torch's default device.
        state_dtype: of the recurrent states.
        mamba_state_commit: what becomes of the recurrent states when a path is accepted: ``"reconstruct"`` rebuilds and writes
            one state a commit, ``"fused"`` lets the next verification do so while it reads the state, ``"replay"`` writes one
            every ``flush_every`` accepted tokens, ``"store_all"`` keeps one a node. The tokens are the same.
        flush_every: accepted tokens that ``"replay"`` lets wait, 1 for none; by default what measurements favour.
        layer_shapes: what each layer keeps, for a model whose family is not known.

    Raises:
        NotImplementedError: for a layer whose state cannot be branched; the message names it.
        ValueError: for sizes that leave no room for a tree.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        batch_size: int,
        max_length: int,
        max_nodes: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        state_dtype: torch.dtype = torch.float32,
        mamba_state_commit: str = "reconstruct",
        flush_every: int | None = None,
        layer_shapes: Sequence[LayerShape] | None = None,
    ) -> None:
        self.config = config
        trace_through_fla()
        trace_the_ordinary_branch()
        text = config.get_text_config(decoder=True)
        self.shapes = list(layer_shapes) if layer_shapes is not None else shapes_of_layers(text)
        CacheBuffers.__init__(
            self,
            self.shapes,
            batch_size,
            max_length,
            max_nodes,
            dtype or getattr(text, "dtype", None) or torch.get_default_dtype(),
            torch.device(device) if device is not None else torch.get_default_device(),
            state_dtype,
            mamba_state_commit,
            flush_every,
        )
        self.tokens = torch.zeros(batch_size, max_nodes, dtype=torch.int64, device=self.device)
        self.position_ids = torch.zeros_like(self.tokens)
        fix(self.tokens, self.position_ids)
        self._length_bound = 0
        layers: list[TreeLinearLayer | TreeSoftmaxLayer] = []
        slots = {LinearShape: 0, SoftmaxShape: 0}
        for index, shape in enumerate(self.shapes):
            slot = slots[type(shape)]
            slots[type(shape)] += 1
            if isinstance(shape, LinearShape):
                layers.append(TreeLinearLayer(self, slot, index, shape))
            else:
                layers.append(TreeSoftmaxLayer(self, slot))
        Cache.__init__(self, layers=layers)

    def prefill(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        chunk_size: int | None = None,
        *,
        rows: Sequence[int] | None = None,
        return_hidden_states: bool = False,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Append a prompt to each row by the model's ordinary forward; see :func:`treewy_inductor.models.prefill.prefill`."""
        return prefill(self, model, input_ids, attention_mask, chunk_size, rows, return_hidden_states)

    def set_tree(self, tree: DraftTree | Sequence[DraftTree | None] | Tensor) -> None:
        """Make the next verification's nodes follow each other as ``tree`` says, padded with inert nodes.

        Args:
            tree: one tree for all rows; or one for each row, None for a row that verifies nothing; or parents ``[N']`` or
                ``[B, N']``, -1 at a root and -2 at an inert node. Parents on an accelerator are trusted, since checking
                them would wait for it.

        Raises:
            ValueError: if a tree has more than ``max_nodes`` nodes, the rows do not match, or a parent is not before its
                node. The tree set before stays.
        """
        self.encoding.fill(self.parents_of(tree))
        self.has_tree = True

    def parents_of(self, tree: DraftTree | Sequence[DraftTree | None] | Tensor) -> Tensor:
        """Return the parents ``[B, max_nodes]`` int32 that :meth:`set_tree` sets, after the same checks; nothing changes."""
        if isinstance(tree, Tensor):
            return self._padded_parents(tree)
        if isinstance(tree, DraftTree):
            # Written once: a step waits for this, and a list becomes a tensor slowly.
            return tree.padded(self.max_nodes).repeat(self.rows, 1)
        trees = list(tree)
        if len(trees) != self.rows:
            raise ValueError(f"{len(trees)} trees for {self.rows} rows: give one a row, None for an idle row")
        idle = torch.full((self.max_nodes,), INERT, dtype=torch.int32)
        return torch.stack([idle if one is None else one.padded(self.max_nodes) for one in trees])

    def inputs(self, tokens: Tensor) -> dict[str, Tensor | bool | Cache]:
        """Return the arguments of the model that verifies ``tokens`` as the nodes of the tree that was set.

        The tensors are the cache's own and are overwritten by the next call, so a captured CUDA graph reads the new ones.

        Args:
            tokens: ``[B, N']`` int64, ``N' <= max_nodes``; what stands at an inert node is not read.

        Raises:
            ValueError: if the tokens do not fit, no tree was set, or a row has no room left for a tree.
        """
        if not self.has_tree:
            raise ValueError("no tree was set: call TreeCache.set_tree before TreeCache.inputs")
        self.check_tokens(tokens)
        self.tokens[:, tokens.shape[1] :] = 0
        self.tokens[:, : tokens.shape[1]].copy_(tokens, non_blocking=True)
        if self.softmax_layers == 0:
            # Without attention a model takes neither positions nor a mask.
            return {"input_ids": self.tokens, "use_cache": True, STATE_CACHE_KEYWORD: self}
        self.position_ids.copy_(self.encoding.positions(self.lengths))
        return {
            "input_ids": self.tokens,
            "position_ids": self.position_ids,
            "attention_mask": self._mask_for_attention(),
            "use_cache": True,
            CACHE_KEYWORD: self,
        }

    def commit(self, path: Tensor) -> None:
        """Keep the accepted nodes and forget the others: :meth:`CacheBuffers.commit_tensors` after checking ``path``."""
        if path.dim() != 2 or path.shape[0] != self.rows or path.shape[1] > self.max_nodes:
            raise ValueError(
                f"path is {list(path.shape)}, expected {self.rows} rows of at most {self.max_nodes} nodes, padded with -1"
            )
        if path.device != self.device or path.dtype != torch.int32:
            raise ValueError(f"path is {path.dtype} on {path.device}, expected int32 on {self.device}")
        self.commit_tensors(path)
        self.note_commit(path.shape[1])

    def note_commit(self, nodes: int) -> None:
        """Reckon with rows that are up to ``nodes`` tokens longer, after a commit that the host did not see."""
        self._length_bound += nodes

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Empty the given rows, or all: a row then equals a fresh one."""
        index = self.row_index(rows)
        self.states.settle(index)
        for tensor in (self.state, self.history, self.keys, self.values):
            tensor[:, index] = 0
        self.lengths[index] = 0

    def snapshot(self, rows: Sequence[int] | None = None) -> CacheSnapshot:
        """Return copies of what the given rows, or all, have committed."""
        index = self.row_index(rows)
        lengths = self.bound_lengths()
        return take_rows(self, index, max(lengths[row] for row in index.tolist()))

    def restore(self, snapshot: CacheSnapshot, rows: Sequence[int] | None = None) -> None:
        """Make the given rows, or all, hold what ``snapshot`` holds; row i of it goes to ``rows[i]``."""
        put_rows(self, snapshot, self.row_index(rows))
        self.bound_lengths()

    def fork(self, rows: Sequence[int]) -> TreeCache:
        """Return a new cache whose row i continues what row ``rows[i]`` has committed; a row may be named repeatedly."""
        forked = TreeCache(
            self.config,
            len(rows),
            self.max_length,
            self.max_nodes,
            dtype=self.dtype,
            device=self.device,
            state_dtype=self.state.dtype,
            mamba_state_commit=self.states.policy,
            flush_every=self.states.flush_every,
            layer_shapes=self.shapes,
        )
        forked.restore(self.snapshot(rows))
        return forked

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Make row i continue what row ``rows[i]`` had committed, in place; the tree has to be set again."""
        self.restore(self.snapshot(rows.tolist() if isinstance(rows, Tensor) else rows))
        self.has_tree = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """As :meth:`reorder`, under the name that transformers calls."""
        self.reorder(beam_idx)

    def save(self, path: str | Path, rows: Sequence[int] | None = None) -> None:
        """Write what the given rows, or all, have committed to a safetensors file."""
        self.snapshot(rows).save(path)

    def load(self, path: str | Path, rows: Sequence[int] | None = None) -> None:
        """Make the given rows, or all, hold what :meth:`save` wrote."""
        self.restore(CacheSnapshot.load(path, self.device), rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: a committed token cannot be taken back, only not be committed."""
        raise NotImplementedError(
            f"crop({tokens_to_remove}) on a TreeCache: committed tokens are final; commit only what is kept, or go back to a "
            "snapshot"
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse: the batch size is fixed."""
        raise NotImplementedError(f"batch_repeat_interleave({repeats}) on a TreeCache of fixed size: use TreeCache.fork")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refuse: the batch size is fixed."""
        raise NotImplementedError("batch_select_indices on a TreeCache of fixed size: use TreeCache.fork")

    def bound_lengths(self) -> list[int]:
        """Return the rows' lengths, waiting for the device, and note the longest as the bound of :meth:`inputs`."""
        lengths = self.lengths.tolist()
        self._length_bound = max(lengths)
        return lengths

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise as :meth:`inputs` does if ``tokens`` do not fit or a row has no room left for a tree."""
        if tokens.dim() != 2 or tokens.shape[0] != self.rows or tokens.shape[1] > self.max_nodes:
            raise ValueError(f"tokens is {list(tokens.shape)}, expected {self.rows} rows of at most {self.max_nodes} nodes")
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(f"tokens is {tokens.dtype}, expected numbers of tokens in int64")
        # The true lengths are on the device: only a bound that has grown to the limit is worth waiting for them.
        if self._length_bound + self.max_nodes > self.max_length:
            lengths = self.bound_lengths()
            if self._length_bound + self.max_nodes > self.max_length:
                raise ValueError(
                    f"row {lengths.index(self._length_bound)} holds {self._length_bound} of {self.max_length} tokens and has "
                    f"no room for {self.max_nodes} nodes: finish the row or construct the cache with a larger max_length"
                )

    def _padded_parents(self, parents: Tensor) -> Tensor:
        rows = parents.expand(self.rows, -1) if parents.dim() == 1 else parents
        if rows.dim() != 2 or rows.shape[0] != self.rows or rows.shape[1] > self.max_nodes:
            raise ValueError(
                f"parents is {list(parents.shape)}, expected {self.rows} rows of at most {self.max_nodes} nodes: draft fewer "
                "nodes or construct the cache with a larger max_nodes"
            )
        if rows.device.type == "cpu":
            for row in rows.tolist():
                for t, parent in enumerate(row):
                    if not INERT <= parent < t or (parent >= 0 and row[parent] == INERT):
                        raise ValueError(
                            f"parents[{t}] is {parent}, expected a node before {t} that is not inert, -1 or -2: order parents "
                            "before children"
                        )
        return torch.nn.functional.pad(rows.int(), (0, self.max_nodes - rows.shape[1]), value=INERT)

    def row_index(self, rows: Sequence[int] | None) -> Tensor:
        """Return ``rows``, or all rows, as an int64 tensor on the cache's device, after checking that they exist."""
        chosen = list(range(self.rows)) if rows is None else [int(row) for row in rows]
        for row in chosen:
            if not 0 <= row < self.rows:
                raise ValueError(f"row {row} is not one of the {self.rows} rows of this cache")
        return torch.tensor(chosen, dtype=torch.int64, device=self.device)

    @cached_property
    def mask(self) -> Tensor:
        """``[B, 1, N, max_length]`` bool, which key each node attends; made when an attention that reads it first runs."""
        mask = self.position_ids.new_zeros((self.rows, 1, self.max_nodes, self.max_length), dtype=torch.bool)
        fix(mask)
        return mask

    @cached_property
    def packed_tree(self) -> Tensor:
        """``[B, 1, N, W + 1]`` int64, what ``attn_implementation="treewy"`` reads in place of a mask."""
        ancestors = self.encoding.ancestors
        packed = ancestors.new_zeros((self.rows, 1, self.max_nodes, ancestors.shape[2] + 1))
        fix(packed)
        return packed

    def _mask_for_attention(self) -> Tensor:
        implementation = self.config.get_text_config(decoder=True)._attn_implementation
        if implementation == TREE_ATTENTION:
            return pack_tree(self.packed_tree, self.encoding.ancestors, self.lengths)
        self.encoding.fill_mask(self.mask, self.lengths)
        if implementation == "eager":
            # Eager attention adds its mask to the scores.
            added = torch.where(self.mask, 0.0, torch.finfo(self.dtype).min).to(self.dtype)
            torch._dynamo.mark_static(added)
            return added
        return self.mask
