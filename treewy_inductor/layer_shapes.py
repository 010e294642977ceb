"""What the layers of a model keep between two tokens, as far as a cache must know it.

A family file says one of these for every type of layer in its configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

# Accepted tokens that a cache lets wait under the policy "replay", unless it is told otherwise.
FLUSH_EVERY = 16


@dataclass(frozen=True)
class LinearShape:
    """A layer with a matrix state that every token overwrites, behind a short causal convolution.

    Attributes:
        key_heads: heads of query and key; each serves ``value_heads / key_heads`` heads of the state.
        value_heads: heads of value, decay, beta and state.
        key_dim: channels of a query or key.
        value_dim: channels of a value.
        conv_channels: channels that go through the convolution.
        conv_kernel: taps of the convolution, as many as the columns of history that the model keeps.
        decay_per_channel: whether each key channel decays on its own (KDA) or a head as a whole.
        state_is_value_major: whether the model holds the state as ``[B, HV, V, K]`` (Mamba2) or ``[B, HV, K, V]``.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_kernel: int
    decay_per_channel: bool = False
    state_is_value_major: bool = False


@dataclass(frozen=True)
class SoftmaxShape:
    """A layer that keeps a key and a value for each token.

    Attributes:
        heads: heads of keys and values; one for the shared latent of MLA.
        key_dim: channels of a key.
        value_dim: channels of a value.
    """

    heads: int
    key_dim: int
    value_dim: int


LayerShape = LinearShape | SoftmaxShape
