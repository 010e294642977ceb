"""Qwen3.5 with experts: the layers of Qwen3.5, a mixture of experts after each."""

from __future__ import annotations

from treewy_inductor.models.qwen3_5 import layer_shapes

MODEL_TYPES = ("qwen3_5_moe_text",)

__all__ = ["MODEL_TYPES", "layer_shapes"]
