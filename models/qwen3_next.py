"""Qwen3-Next: the states of Qwen3.5, projected in another order, a mixture of experts after each layer."""

from __future__ import annotations

from treewy_inductor.models.qwen3_5 import layer_shapes

MODEL_TYPES = ("qwen3_next",)

__all__ = ["MODEL_TYPES", "layer_shapes"]
