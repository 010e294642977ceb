"""What the layers of a model keep between two tokens, as far as a cache must know it.

A family file says one of these for every type of layer in its configuration.
"""

from __future__ import annotations

from dataclasses import dataclass


def default_flush_every(nodes: int, states: int) -> int:
    """Return how many accepted tokens a cache lets wait under the policy "replay", unless it is told otherwise.

    1 means that every commit writes the state, by the kernels of "reconstruct". H200, 2026-11-30, `python -m bench.policies`
    at commits 34abd7b and cbe172b, 35B-A3B and a rank of 397B-A17B: on a chain of 4 a trunk of 16 tokens made verify and
    commit of a layer 1.15 times faster at 256 states, 1.31 to 1.40 times from 1,024 on, and slower, 0.87 to 0.93 times, up to
    64; on 40 nodes it was slower at every size, 0.65 to 0.81 times, since there writing the state is a smaller part.

    Args:
        nodes: of the largest tree.
        states: that a layer holds, rows times value heads.
    """
    return 16 if nodes <= 16 and states >= 256 else 1


# Bytes: a layer of a buffer begins at a multiple of it, as aligned_zeros.py says.
LAYER_ALIGNMENT = 16


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
