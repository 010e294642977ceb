"""The ops of the package: schema, fake kernel, and the reference as their eager meaning.

    B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim   C channels   W words of 64 nodes   L layers

Passes write these ops into a graph and lowerings read them; nothing here needs Triton or transformers. Shapes are checked
in the fake kernels, once, so that the reference and the kernels may trust them.

    tree_gated_delta     query, key [B,N,HK,K]; value [B,N,HV,V]; log_decay [B,N,HV] or [B,N,HV,K] (a channel each); beta
                         [B,N,HV]; state [B,HV,K,V]; ancestors [B,N,W] int64; order [B,N], internal [B], height [B] int32.
                         query and key are l2-normalised with norm_eps inside (as they come if norm_eps < 0), query then
                         multiplied by scale. Returns output [B,N,HV,V] of out_dtype, and in float32 (float64 for a float64
                         state) pseudo-values [B,N,HV,V], path decays like log_decay, key_scale [B,N,HK] = 1/|key|.
    tree_causal_conv1d   inputs [B,C,N]; history [B,C,K]; weight [C,K]; bias [C] or none; window [B,N,K-1] int32.
                         Returns [B,C,N] like inputs, laid out with channels innermost.
    commit_state         state [L,B,HV,K,V] overwritten; keys [L,B,N,HK,K]; key_scale [L,B,N,HK]; pseudo_values [L,B,N,HV,V];
                         path_decay [L,B,N,HV] or [L,B,N,HV,K]; path [B,P] int32, root first, -1 after the accepted node.
    commit_conv          history [L,B,C,K] overwritten; inputs [L,B,C,N]; path [B,P].
    commit_keys_values   keys, values [L,B,H,T,D] overwritten; lengths [B] int64; path [B,P].
    store                buffer overwritten by value of its shape, converted to its type.

Markers stand in a traced graph where the model touched the cache. A pass replaces them; one that runs raises, since the
model's own code would have treated the tree as a chain.

    state_in             state [B,HV,K,V] with the encoding's ancestors, order, internal, height: returns a state like it.
    state_out            final_state [B,HV,K,V] and the buffers to be filled: pseudo_values [B,N,HV,V], keys [B,N,HK,K],
                         path_decay [B,N,HV] or [B,N,HV,K], key_scale [B,N,HK]: returns their new contents.
    conv_in              inputs [B,C,N]; history [B,C,K]; window [B,N,K-1]: returns [B,C,K+N], history then inputs.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from treewy_inductor import reference

_TREE = "Tensor ancestors, Tensor order, Tensor internal, Tensor height"

torch.library.define(
    "treewy::tree_gated_delta",
    "(Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor beta, Tensor state, "
    f"{_TREE}, float scale, float norm_eps, ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "treewy::tree_causal_conv1d",
    "(Tensor inputs, Tensor history, Tensor weight, Tensor? bias, Tensor window) -> Tensor",
)
torch.library.define(
    "treewy::commit_state",
    "(Tensor(a!) state, Tensor keys, Tensor key_scale, Tensor pseudo_values, Tensor path_decay, Tensor path) -> ()",
)
torch.library.define("treewy::commit_conv", "(Tensor(a!) history, Tensor inputs, Tensor path) -> ()")
torch.library.define("treewy::commit_keys_values", "(Tensor(a!) keys, Tensor(b!) values, Tensor lengths, Tensor path) -> ()")
torch.library.define("treewy::store", "(Tensor(a!) buffer, Tensor value) -> ()")
torch.library.define("treewy::state_in", f"(Tensor state, {_TREE}, int layer, int slot) -> Tensor")
torch.library.define(
    "treewy::state_out",
    "(Tensor final_state, Tensor pseudo_values, Tensor keys, Tensor path_decay, Tensor key_scale, int layer, int slot)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define("treewy::conv_in", "(Tensor inputs, Tensor history, Tensor window, int layer, int slot) -> Tensor")

for _name in ("tree_gated_delta", "tree_causal_conv1d", "commit_state", "commit_conv", "commit_keys_values", "store"):
    torch.library.impl(f"treewy::{_name}", "CompositeExplicitAutograd", getattr(reference, _name))

tree_gated_delta = torch.ops.treewy.tree_gated_delta.default
tree_causal_conv1d = torch.ops.treewy.tree_causal_conv1d.default
commit_state = torch.ops.treewy.commit_state.default
commit_conv = torch.ops.treewy.commit_conv.default
commit_keys_values = torch.ops.treewy.commit_keys_values.default
store = torch.ops.treewy.store.default
state_in = torch.ops.treewy.state_in.default
state_out = torch.ops.treewy.state_out.default
conv_in = torch.ops.treewy.conv_in.default

MARKERS = (state_in, state_out, conv_in)


@torch.library.register_fake("treewy::tree_gated_delta")
def _tree_gated_delta_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    ancestors: Tensor,
    order: Tensor,
    internal: Tensor,
    height: Tensor,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, N, HK, K = key.shape
    HV, V = value.shape[2:]

    def check(name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
        torch._check(
            tuple(tensor.shape) in shapes,
            lambda: f"tree_gated_delta: {name} is {list(tensor.shape)}, expected {' or '.join(map(str, map(list, shapes)))}",
        )

    torch._check(HV % HK == 0, lambda: f"tree_gated_delta: {HV} value heads are not a multiple of {HK} key heads")
    check("query", query, (B, N, HK, K))
    check("value", value, (B, N, HV, V))
    check("log_decay", log_decay, (B, N, HV), (B, N, HV, K))
    check("beta", beta, (B, N, HV))
    check("state", state, (B, HV, K, V))
    check("ancestors", ancestors, (B, N, -(-N // 64)))
    check("order", order, (B, N))
    check("internal", internal, (B,))
    check("height", height, (B,))
    work = torch.promote_types(state.dtype, torch.float32)
    return (
        value.new_empty((B, N, HV, V), dtype=out_dtype),
        value.new_empty((B, N, HV, V), dtype=work),
        value.new_empty(log_decay.shape, dtype=work),
        value.new_empty((B, N, HK), dtype=work),
    )


@torch.library.register_fake("treewy::tree_causal_conv1d")
def _tree_causal_conv1d_fake(inputs: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor) -> Tensor:
    B, C, N = inputs.shape
    torch._check(
        tuple(weight.shape) == (C, history.shape[2]) and tuple(history.shape[:2]) == (B, C),
        lambda: (
            f"tree_causal_conv1d: history {list(history.shape)} and weight {list(weight.shape)} for inputs {[B, C, N]}: "
            "expected [B, C, K] and [C, K]"
        ),
    )
    torch._check(
        tuple(window.shape) == (B, N, weight.shape[1] - 1),
        lambda: f"tree_causal_conv1d: window is {list(window.shape)}, expected {[B, N, weight.shape[1] - 1]}",
    )
    return inputs.new_empty((B, N, C)).transpose(1, 2)


@torch.library.register_fake("treewy::commit_state")
def _commit_state_fake(
    state: Tensor, keys: Tensor, key_scale: Tensor, pseudo_values: Tensor, path_decay: Tensor, path: Tensor
) -> None:
    L, B, HV, K, V = state.shape
    N, HK = keys.shape[2:4]
    torch._check(
        tuple(keys.shape) == (L, B, N, HK, K)
        and tuple(key_scale.shape) == (L, B, N, HK)
        and tuple(pseudo_values.shape) == (L, B, N, HV, V)
        and tuple(path_decay.shape) in ((L, B, N, HV), (L, B, N, HV, K))
        and path.shape[0] == B,
        lambda: (
            f"commit_state: state {list(state.shape)}, keys {list(keys.shape)}, key_scale {list(key_scale.shape)}, "
            f"pseudo_values {list(pseudo_values.shape)}, path_decay {list(path_decay.shape)}, path {list(path.shape)} "
            "do not agree"
        ),
    )


@torch.library.register_fake("treewy::commit_conv")
def _commit_conv_fake(history: Tensor, inputs: Tensor, path: Tensor) -> None:
    torch._check(
        history.shape[:3] == inputs.shape[:3] and path.shape[0] == history.shape[1],
        lambda: (
            f"commit_conv: history {list(history.shape)}, inputs {list(inputs.shape)}, path {list(path.shape)} do not agree"
        ),
    )


@torch.library.register_fake("treewy::commit_keys_values")
def _commit_keys_values_fake(keys: Tensor, values: Tensor, lengths: Tensor, path: Tensor) -> None:
    torch._check(
        keys.shape[:4] == values.shape[:4] and lengths.shape[0] == path.shape[0] == keys.shape[1],
        lambda: (
            f"commit_keys_values: keys {list(keys.shape)}, values {list(values.shape)}, lengths {list(lengths.shape)}, "
            f"path {list(path.shape)} do not agree"
        ),
    )


@torch.library.register_fake("treewy::store")
def _store_fake(buffer: Tensor, value: Tensor) -> None:
    torch._check(buffer.shape == value.shape, lambda: f"store: value {list(value.shape)} into buffer {list(buffer.shape)}")


@torch.library.register_fake("treewy::state_in")
def _state_in_fake(
    state: Tensor, ancestors: Tensor, order: Tensor, internal: Tensor, height: Tensor, layer: int, slot: int
) -> Tensor:
    return torch.empty_like(state, memory_format=torch.contiguous_format)


@torch.library.register_fake("treewy::state_out")
def _state_out_fake(
    final_state: Tensor,
    pseudo_values: Tensor,
    keys: Tensor,
    path_decay: Tensor,
    key_scale: Tensor,
    layer: int,
    slot: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(pseudo_values),
        torch.empty_like(keys),
        torch.empty_like(path_decay),
        torch.empty_like(key_scale),
    )


@torch.library.register_fake("treewy::conv_in")
def _conv_in_fake(inputs: Tensor, history: Tensor, window: Tensor, layer: int, slot: int) -> Tensor:
    return inputs.new_empty((*inputs.shape[:2], history.shape[2] + inputs.shape[2]))


def marker_ran(name: str) -> NoReturn:
    raise RuntimeError(
        f"treewy::{name} reached run time: a TreeCache only works in a model compiled with "
        'torch.compile(model, backend="treewy", fullgraph=True). Run eagerly or under another backend, the model would treat '
        "the tree as a chain and write wrong states. Use the model's ordinary cache there, or TreeCache.prefill for the prompt"
    )


torch.library.impl("treewy::state_in", "CompositeExplicitAutograd", lambda *_: marker_ran("state_in"))
torch.library.impl("treewy::state_out", "CompositeExplicitAutograd", lambda *_: marker_ran("state_out"))
torch.library.impl("treewy::conv_in", "CompositeExplicitAutograd", lambda *_: marker_ran("conv_in"))
