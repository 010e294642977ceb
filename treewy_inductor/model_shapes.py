"""Shapes of the published hybrid models, as far as their caches and states depend on them.

One row is one checkpoint; the numbers are those of its ``config.json``. Nothing here needs transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from treewy_inductor.layer_shapes import LayerShape, LinearShape, SoftmaxShape


@dataclass(frozen=True)
class ModelShape:
    """What one hybrid model keeps per token and per sequence.

    Attributes:
        name: as its authors write it.
        linear_layers: layers with a recurrent state, each of shape ``linear``.
        softmax_layers: layers whose keys and values grow with the text, each of shape ``softmax``.
        hidden: width of the residual stream.
    """

    name: str
    linear_layers: int
    softmax_layers: int
    hidden: int
    linear: LinearShape
    softmax: SoftmaxShape

    def layers(self) -> list[LayerShape]:
        """Return the shapes of all layers, the linear ones first: their order does not matter to a cache."""
        return [self.linear] * self.linear_layers + [self.softmax] * self.softmax_layers

    def shard(self, ranks: int) -> ModelShape:
        """Return what one of ``ranks`` tensor-parallel ranks holds: its share of every layer's heads.

        Fewer key/value heads than ranks are copied to several ranks, one head each.

        Raises:
            ValueError: if the heads of the linear layers cannot be divided evenly.
        """
        heads = self.linear.key_heads, self.linear.value_heads
        if heads[0] % ranks or heads[1] % ranks:
            raise ValueError(
                f"{self.name} has {heads[0]} key heads and {heads[1]} value heads, which {ranks} ranks cannot share evenly: "
                "choose a number of ranks that divides both"
            )
        key_heads, value_heads = heads[0] // ranks, heads[1] // ranks
        return replace(
            self,
            name=f"{self.name}, one of {ranks} ranks",
            linear=gated_delta(key_heads, value_heads, self.linear.key_dim, self.linear.value_dim),
            softmax=replace(self.softmax, heads=max(1, self.softmax.heads // ranks)),
        )


def gated_delta(
    key_heads: int, value_heads: int, key_dim: int = 128, value_dim: int = 128, *, decay_per_channel: bool = False
) -> LinearShape:
    """Return the shape of a gated delta layer: query, key and value of all heads go through a convolution of 4 taps."""
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return LinearShape(key_heads, value_heads, key_dim, value_dim, channels, 4, decay_per_channel)


MODELS: dict[str, ModelShape] = {
    shape.name.lower(): shape
    for shape in (
        ModelShape("Qwen3.5-0.8B", 18, 6, 1024, gated_delta(16, 16), SoftmaxShape(2, 256, 256)),
        ModelShape("Qwen3.5-2B", 18, 6, 2048, gated_delta(16, 16), SoftmaxShape(2, 256, 256)),
        ModelShape("Qwen3.5-4B", 24, 8, 2560, gated_delta(16, 32), SoftmaxShape(4, 256, 256)),
        ModelShape("Qwen3.5-9B", 24, 8, 4096, gated_delta(16, 32), SoftmaxShape(4, 256, 256)),
        ModelShape("Qwen3.5-27B", 48, 16, 5120, gated_delta(16, 48), SoftmaxShape(4, 256, 256)),
        ModelShape("Qwen3.5-35B-A3B", 30, 10, 2048, gated_delta(16, 32), SoftmaxShape(2, 256, 256)),
        ModelShape("Qwen3.5-397B-A17B", 45, 15, 4096, gated_delta(16, 64), SoftmaxShape(2, 256, 256)),
        ModelShape("Qwen3-Next-80B-A3B", 36, 12, 2048, gated_delta(16, 32), SoftmaxShape(2, 256, 256)),
        ModelShape("OLMo-Hybrid-7B", 24, 8, 3840, gated_delta(30, 30, 96, 192), SoftmaxShape(30, 128, 128)),
        # Latent attention keeps one head: the latent of 512 channels, and a rotary key of 64 shared by all heads.
        ModelShape("Kimi-Linear-48B-A3B", 20, 7, 2304, gated_delta(32, 32, decay_per_channel=True), SoftmaxShape(1, 512, 64)),
    )
}


def model_shape(name: str) -> ModelShape:
    """Return the row of ``MODELS`` called ``name``, whatever its capitals and its owner.

    Raises:
        ValueError: naming the known models, if there is none.
    """
    key = name.lower().rsplit("/", 1)[-1]
    if key not in MODELS:
        raise ValueError(f"model {name!r} is not in the table of shapes: choose one of {', '.join(MODELS)}")
    return MODELS[key]
