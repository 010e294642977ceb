"""Shapes of the published hybrid models, as far as their caches and states depend on them.

One row is one checkpoint family at one size; the numbers are those of its ``config.json``. Nothing here needs transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ModelShape:
    """What one hybrid model keeps per token and per sequence.

    Attributes:
        linear_layers: layers with a recurrent state.
        full_layers: layers with softmax attention, whose keys and values grow with the text.
        key_heads, value_heads, key_dim, value_dim: of the linear layers; the state is ``[value_heads, key_dim, value_dim]``.
        cached_heads: key/value heads of the softmax layers.
        cached_key_dim, cached_value_dim: width of one cached row. A latent attention (MLA) caches one head: its latent and its
            rotary key.
        convolution: taps of the short convolution over query, key and value.
        decay_per_channel: true where every key channel has its own decay (Kimi delta attention).
        hidden: width of the residual stream.
    """

    name: str
    linear_layers: int
    full_layers: int
    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    cached_heads: int = 2
    cached_key_dim: int = 256
    cached_value_dim: int = 256
    convolution: int = 4
    decay_per_channel: bool = False

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: query and key of every key head, value of every value head."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Numbers in the recurrent states of one sequence, over all layers."""
        return self.linear_layers * self.value_heads * self.key_dim * self.value_dim

    def shard(self, ranks: int) -> ModelShape:
        """Return what one of ``ranks`` tensor-parallel ranks holds: its share of the heads of every layer.

        Fewer key/value heads than ranks are copied to several ranks, one head each.

        Raises:
            ValueError: if the heads of the linear layers cannot be divided evenly.
        """
        if self.key_heads % ranks or self.value_heads % ranks:
            raise ValueError(
                f"{self.name} has {self.key_heads} key heads and {self.value_heads} value heads, which {ranks} ranks cannot "
                "share evenly: choose a number of ranks that divides both"
            )
        return replace(
            self,
            name=f"{self.name} (1 of {ranks} ranks)",
            key_heads=self.key_heads // ranks,
            value_heads=self.value_heads // ranks,
            cached_heads=max(1, self.cached_heads // ranks),
        )


MODELS: dict[str, ModelShape] = {
    "qwen3.5-0.8b": ModelShape("Qwen3.5-0.8B", 18, 6, 1024, 16, 16),
    "qwen3.5-2b": ModelShape("Qwen3.5-2B", 18, 6, 2048, 16, 16),
    "qwen3.5-4b": ModelShape("Qwen3.5-4B", 24, 8, 2560, 16, 32, cached_heads=4),
    "qwen3.5-9b": ModelShape("Qwen3.5-9B", 24, 8, 4096, 16, 32, cached_heads=4),
    "qwen3.5-27b": ModelShape("Qwen3.5-27B", 48, 16, 5120, 16, 48, cached_heads=4),
    "qwen3.5-35b-a3b": ModelShape("Qwen3.5-35B-A3B", 30, 10, 2048, 16, 32),
    "qwen3.5-397b-a17b": ModelShape("Qwen3.5-397B-A17B", 45, 15, 4096, 16, 64),
    "qwen3-next-80b-a3b": ModelShape("Qwen3-Next-80B-A3B", 36, 12, 2048, 16, 32),
    "olmo-hybrid-7b": ModelShape(
        "OLMo-Hybrid-7B",
        24,
        8,
        3840,
        30,
        30,
        key_dim=96,
        value_dim=192,
        cached_heads=30,
        cached_key_dim=128,
        cached_value_dim=128,
    ),
    "kimi-linear-48b-a3b": ModelShape(
        "Kimi-Linear-48B-A3B",
        20,
        7,
        2304,
        32,
        32,
        cached_heads=1,
        cached_key_dim=512,
        cached_value_dim=64,
        decay_per_channel=True,
    ),
}


def model_shape(name: str) -> ModelShape:
    """Return the row of ``MODELS`` called ``name``, whatever its capitals.

    Raises:
        ValueError: naming the known models, if there is none.
    """
    key = name.lower().rsplit("/", 1)[-1]
    if key not in MODELS:
        raise ValueError(f"model {name!r} is not in the table of shapes: choose one of {', '.join(MODELS)}")
    return MODELS[key]
