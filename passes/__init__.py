"""Graph passes: recognise what reads a TreeCache, prove it, rewrite it for a tree. ``PASSES`` stand in the order of running."""

from treewy_inductor.passes.call_copies import call_copies
from treewy_inductor.passes.join_conv_silu import join_conv_silu
from treewy_inductor.passes.join_narrow_products import join_narrow_products
from treewy_inductor.passes.outline_layers import outline_layers
from treewy_inductor.passes.rewrite_causal_conv import rewrite_causal_conv
from treewy_inductor.passes.rewrite_gated_delta import rewrite_gated_delta
from treewy_inductor.passes.slice_before_add import slice_before_add

PASSES = (rewrite_causal_conv, slice_before_add, rewrite_gated_delta)

__all__ = [
    "PASSES",
    "call_copies",
    "join_conv_silu",
    "join_narrow_products",
    "outline_layers",
    "rewrite_causal_conv",
    "rewrite_gated_delta",
    "slice_before_add",
]
