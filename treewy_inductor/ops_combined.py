"""Ops that compute what a graph computes anyway, in fewer passes over memory: schema, fake kernel, and eager meaning.

B batch   C channels   N nodes   K kernel and history columns   M rows   R summed elements   V vocabulary

tree_conv_silu    inputs, history, weight, bias, window as tree_causal_conv1d takes them, K at least 2. Returns its result
                  after silu, rounded only then, and the inputs once more, both [B,C,N] like inputs and with channels
                  innermost; and ``heads`` times ``dim`` channels of the result from ``first`` on, [B,N,heads,dim].
narrow_products   x [M,R]; left [R,n]; right [R,m]. Returns x @ left and x @ right, like x.
best_token        logits [..., V] float. Returns [...] int64, the index of the largest: the first of equals, NaN above all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treewy_inductor import ops, reference

torch.library.define(
    "treewy::tree_conv_silu",
    "(Tensor inputs, Tensor history, Tensor weight, Tensor? bias, Tensor window, int first, int heads, int dim)"
    " -> (Tensor, Tensor, Tensor)",
)
torch.library.define("treewy::narrow_products", "(Tensor x, Tensor left, Tensor right) -> (Tensor, Tensor)")
torch.library.define("treewy::best_token", "(Tensor logits) -> Tensor")

tree_conv_silu = torch.ops.treewy.tree_conv_silu.default
narrow_products = torch.ops.treewy.narrow_products.default
best_token = torch.ops.treewy.best_token.default


def convolve_and_activate(
    inputs: Tensor,
    history: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    first: int,
    heads: int,
    dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of ``tree_conv_silu``."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    convolved = reference.tree_causal_conv1d(inputs.to(wide), history.to(wide), weight, bias, window)
    y, kept = (
        torch.empty_like(inputs.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2) for _ in range(2)
    )
    y.copy_(torch.nn.functional.silu(convolved))
    part = y.transpose(1, 2)[..., first : first + heads * dim].unflatten(2, (heads, dim)) if heads else y.new_empty(0)
    B, _, N = inputs.shape
    return y, kept.copy_(inputs), part.clone(memory_format=torch.contiguous_format).view(B, N, heads, dim)


def multiply_both(x: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The reference of ``narrow_products``."""
    return x @ left, x @ right


def most_likely(logits: Tensor) -> Tensor:
    """The reference of ``best_token``."""
    return logits.argmax(-1)


for _name, _meaning in (
    ("tree_conv_silu", convolve_and_activate),
    ("narrow_products", multiply_both),
    ("best_token", most_likely),
):
    torch.library.impl(f"treewy::{_name}", "CompositeExplicitAutograd", _meaning)


@torch.library.register_fake("treewy::tree_conv_silu")
def _tree_conv_silu_fake(
    inputs: Tensor,
    history: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    first: int,
    heads: int,
    dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    B, C, N = ops.tree_causal_conv1d(inputs, history, weight, bias, window).shape
    torch._check(weight.shape[1] > 1, lambda: "tree_conv_silu: a kernel of 1 sees no ancestor: use tree_causal_conv1d")
    torch._check(
        first >= 0 and first + heads * dim <= C,
        lambda: f"tree_conv_silu: {heads} heads of {dim} from channel {first} on do not lie in {C} channels",
    )
    y, kept = (inputs.new_empty((B, N, C)).transpose(1, 2) for _ in range(2))
    return y, kept, inputs.new_empty((B, N, heads, dim))


@torch.library.register_fake("treewy::narrow_products")
def _narrow_products_fake(x: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    torch._check(
        x.shape[1] == left.shape[0] == right.shape[0] and x.dtype == left.dtype == right.dtype,
        lambda: (
            f"narrow_products: x {list(x.shape)} {x.dtype}, left {list(left.shape)} {left.dtype}, "
            f"right {list(right.shape)} {right.dtype}: expected [M, R], [R, n] and [R, m] of one dtype"
        ),
    )
    return x.new_empty((x.shape[0], left.shape[1])), x.new_empty((x.shape[0], right.shape[1]))


@torch.library.register_fake("treewy::best_token")
def _best_token_fake(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)
