"""What the model's own code finds in a TreeCache: a layer of softmax attention, and one with a recurrent state.

A linear layer answers with marker ops, which carry the tree into the traced graph for the rewriting pass to find. Older
versions of transformers read a layer's attributes, newer ones ask the cache, which reads the same attributes: states are
properties, so each read puts its marker into the graph.

    B batch   N nodes   H heads   T max_length   D head dim   C channels   K key dim, or kernel   V value dim
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from treewy_inductor import ops
from treewy_inductor.cache_buffers import CacheBuffers
from treewy_inductor.errors import misused
from treewy_inductor.fixed_tensors import fix
from treewy_inductor.layer_shapes import LinearShape


def _refuse_chain(buffers: CacheBuffers) -> NoReturn:
    _check_tree(buffers)
    misused(
        "a forward on a TreeCache without the tree's position_ids or attention_mask, in which the nodes would follow each "
        "other as a chain: call model(**cache.inputs(tokens))"
    )


def _check_tree(buffers: CacheBuffers) -> None:
    if not buffers.has_tree:
        misused("a forward on a TreeCache before any tree was set: call TreeCache.set_tree, then TreeCache.inputs")


def _check_forward(buffers: CacheBuffers, tensor: Tensor, tokens: int, name: str) -> None:
    _check_tree(buffers)
    if tensor.shape[0] != buffers.rows:
        misused(f"a forward of {tensor.shape[0]} rows on a TreeCache of {buffers.rows}: keep the batch size, with inert rows")
    if tokens != buffers.max_nodes:
        misused(
            f"a forward of {tokens} tokens on a TreeCache of {buffers.max_nodes} nodes: pass what TreeCache.inputs returns, "
            "which pads with inert nodes, and use TreeCache.prefill for prompts"
        )
    if tensor.device != buffers.device or tensor.dtype != buffers.dtype:
        misused(
            f"{name} is {tensor.dtype} on {tensor.device}, the TreeCache holds {buffers.dtype} on {buffers.device}: "
            "construct it with the model's dtype and device"
        )


class TreeSoftmaxLayer(CacheLayerMixin):
    """Keys and values of one layer: committed tokens, then the draft's nodes at ``[length, length + N)`` of each row.

    Args:
        buffers: of the whole cache.
        slot: which of the softmax layers this is.
    """

    is_compileable = True
    is_croppable = False
    is_sliding = False

    def __init__(self, buffers: CacheBuffers, slot: int) -> None:
        super().__init__()
        self.buffers = buffers
        self.keys, self.values = buffers.keys[slot], buffers.values[slot]
        self.lengths, self.depth = buffers.lengths, buffers.encoding.depth
        self.row = torch.arange(buffers.rows, device=buffers.device)[:, None]
        self.node = torch.arange(buffers.max_nodes, device=buffers.device)
        self.batch_size, self.max_cache_len = buffers.rows, buffers.max_length
        self.is_initialized = True
        fix(self.keys, self.values, self.row, self.node)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the nodes' keys and values ``[B, H, N, D]`` after the committed ones; return both ``[B, H, T, D]``."""
        _check_forward(self.buffers, key_states, key_states.shape[2], "keys")
        position = self.lengths[:, None] + self.node
        is_node = (self.depth >= 0)[:, None, :, None]
        for buffer, states in ((self.keys, key_states.detach()), (self.values, value_states.detach())):
            # A masked softmax still multiplies what it must not see by zero, and zero times NaN or infinity is NaN. A node
            # that holds one is NaN in the linear layers all the same, and so is whatever follows it.
            readable = torch.where(is_node & states.isfinite(), states, 0)
            buffer[self.row, :, position] = readable.transpose(1, 2)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Refuse: a model that asks makes a mask of its own, which is a chain's."""
        _refuse_chain(self.buffers)

    def get_seq_length(self) -> Tensor:
        """Return the length of the longest row, on the device; a compiled model asks to number the nodes as a chain."""
        if torch.compiler.is_compiling():
            _refuse_chain(self.buffers)
        return self.lengths.max()

    def get_max_length(self) -> int:
        """Return how many tokens a row can hold."""
        return self.max_cache_len

    get_max_cache_shape = get_max_length


class TreeLinearLayer(LinearAttentionCacheLayerMixin):
    """Recurrent state, convolution history and per-node leavings of one layer, read and written through markers.

    Args:
        buffers: of the whole cache.
        slot: which of the linear layers this is.
        index: which of the model's layers this is; markers and messages name it.
        shape: what the layer keeps.
    """

    supports_early_init = False
    is_compileable = True
    is_croppable = False

    def __init__(self, buffers: CacheBuffers, slot: int, index: int, shape: LinearShape) -> None:
        super().__init__()
        self.buffers, self.index, self.shape = buffers, index, shape
        self.states = buffers.states.layer(slot)
        self.history, self.conv_inputs = buffers.history[slot], buffers.conv_inputs[slot]
        self.encoding = buffers.encoding
        self.batch_size, self.device, self.dtype = buffers.rows, buffers.device, buffers.dtype
        self.has_previous_state = {0: True}
        self.is_conv_states_initialized = self.is_recurrent_states_initialized = {0: True}
        self.conv_kernel_size = {0: shape.conv_kernel}
        # With one token most models would convolve in place, past our marker, unless the past is recorded.
        self.record_past = True
        fix(self.history, self.conv_inputs)

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        """The committed state, marked as where a tree's recurrence starts."""
        state = self.states.read(self.encoding, self.index)
        return {0: state.transpose(2, 3) if self.shape.state_is_value_major else state}

    @recurrent_states.setter
    def recurrent_states(self, states: dict[int, Tensor | None]) -> None:
        # The base class assigns empty states when it is constructed.
        pass

    @property
    def conv_states(self) -> dict[int, Tensor]:
        """The convolution's history behind a marker: a model that reads it here, for one token, must not pass silently."""
        nothing = self.conv_inputs[..., :0]
        return {0: ops.conv_in(nothing, self.history, self.encoding.window, self.index, 0)}

    @conv_states.setter
    def conv_states(self, states: dict[int, Tensor | None]) -> None:
        pass

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the buffers exist from the start."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keep the nodes' inputs ``[B, C, N]`` for the commit; return them behind the history, ``[B, C, K+N]``, marked."""
        _check_forward(self.buffers, conv_states, conv_states.shape[2], "the convolution's input")
        self.conv_inputs.copy_(conv_states.detach())
        return ops.conv_in(conv_states, self.history, self.encoding.window, self.index, state_idx)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keep what the commit needs of each node, which a pass puts in place of this marker's results."""
        final = recurrent_states.transpose(2, 3) if self.shape.state_is_value_major else recurrent_states
        self.states.keep(final, self.index, state_idx)
        return recurrent_states
