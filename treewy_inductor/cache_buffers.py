"""The tensors of a cache: what is committed, and what a verified draft tree leaves behind until one path is committed.

    committed   states         the recurrent states and what a verification leaves of them, by commit policy
                history        [L, B, C, K] model dtype, the last inputs of the convolution, newest last
                keys, values   [La, B, H, T, D] model dtype; row b holds lengths[b] tokens, then the draft's nodes
                lengths        [B] int64
    per node    conv_inputs    [L, B, C, N] model dtype, a view of [L, B, N, C]: a node's channels lie together

    B batch  N nodes  C channels  K kernel of the convolution  L linear layers  La softmax layers  H heads of keys and values
    D head dim  T max_length

state_policies.py describes the states; by default nothing of their size is kept per node. All tensors keep their addresses,
so a captured CUDA graph stays valid; one call per op commits all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treewy_inductor import ops
from treewy_inductor.aligned_zeros import aligned_zeros
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.fixed_tensors import fix
from treewy_inductor.layer_shapes import LayerShape, LinearShape, SoftmaxShape
from treewy_inductor.state_policies import make_states

_NO_LINEAR = LinearShape(key_heads=0, value_heads=0, key_dim=0, value_dim=0, conv_channels=0, conv_kernel=1)
_NO_SOFTMAX = SoftmaxShape(heads=0, key_dim=0, value_dim=0)


class CacheBuffers:
    """Zeroed buffers for ``batch_size`` rows of up to ``max_length`` tokens and ``max_nodes`` draft nodes.

    Args:
        shapes: what each of the model's layers keeps; all linear layers the same, all softmax layers the same.
        dtype: of the model's activations.
        state_dtype: of the recurrent states; pseudo-values and decays are kept in float32, in float64 for a float64 state.
        mamba_state_commit: what becomes of the states of a verified tree, ``"reconstruct"``, ``"replay"``, ``"fused"`` or
            ``"store_all"``: see :mod:`treewy_inductor.state_policies`.
        flush_every: how many accepted tokens ``"replay"`` keeps before it writes a state.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        batch_size: int,
        max_length: int,
        max_nodes: int,
        dtype: torch.dtype,
        device: torch.device,
        state_dtype: torch.dtype,
        mamba_state_commit: str = "reconstruct",
        flush_every: int | None = None,
    ) -> None:
        if max_nodes < 2:
            raise ValueError(
                f"max_nodes is {max_nodes}, expected at least 2: a forward of one token takes the model's path for plain "
                "decoding, which writes the states in place"
            )
        if max_length < max_nodes or batch_size < 1:
            raise ValueError(
                f"batch_size is {batch_size} and max_length is {max_length} with {max_nodes} nodes: expected at least one "
                "row and room for a tree"
            )
        linear = [shape for shape in shapes if isinstance(shape, LinearShape)]
        softmax = [shape for shape in shapes if isinstance(shape, SoftmaxShape)]
        if len(set(linear)) > 1 or len(set(softmax)) > 1:
            raise NotImplementedError(
                f"layers of one kind keep different shapes, {set(linear)} and {set(softmax)}: all layers are committed by one "
                "call, which needs one shape a kind"
            )
        B, N = batch_size, max_nodes
        self.linear_layers, self.softmax_layers = L, La = len(linear), len(softmax)
        s, a = (linear or [_NO_LINEAR])[0], (softmax or [_NO_SOFTMAX])[0]

        def zeros(layers: int, *shape: int) -> Tensor:
            return aligned_zeros(layers, *shape, dtype=dtype, device=device)

        self.max_length, self.max_nodes = max_length, max_nodes
        self.states = make_states(mamba_state_commit, flush_every, s, L, B, N, dtype, state_dtype, device)
        self.history = zeros(L, B, s.conv_channels, s.conv_kernel)
        self.keys = zeros(La, B, a.heads, max_length, a.key_dim)
        self.values = zeros(La, B, a.heads, max_length, a.value_dim)
        self.lengths = torch.zeros(B, dtype=torch.int64, device=device)
        self.conv_inputs = zeros(L, B, N, s.conv_channels).transpose(2, 3)
        self.encoding = TreeEncoding(B, N, kernel_size=s.conv_kernel, device=device)
        self.has_tree = False
        fix(self.lengths)

    def commit_tensors(self, path: Tensor) -> None:
        """Make the accepted nodes committed tokens: states, convolution histories, keys, values and lengths of all layers.

        Reads nothing on the host, so that it can be compiled, and captured together with what comes before and after.

        Args:
            path: ``[B, P]`` int32, accepted nodes from the root down, -1 after the last; a row of -1 stays as it is.
        """
        if self.linear_layers:
            self.states.commit(path, self.encoding.parents)
            ops.commit_conv(self.history, self.conv_inputs, path)
        if self.softmax_layers:
            ops.commit_keys_values(self.keys, self.values, self.lengths, path)
        self.lengths.add_((path >= 0).sum(1))

    @property
    def state(self) -> Tensor:
        """The committed recurrent states ``[L, B, HV, K, V]``; call ``states.settle`` before reading or replacing a row's."""
        return self.states.state

    @property
    def device(self) -> torch.device:
        """Where all buffers lie."""
        return self.lengths.device

    @property
    def dtype(self) -> torch.dtype:
        """Of keys, values and convolution inputs: the model's."""
        return self.history.dtype

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.lengths.shape[0]
