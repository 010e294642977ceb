"""Bytes a TreeCache holds, buffer by buffer, for every commit policy: arithmetic on shapes, no tensor is made.

    store_all      one full state a node: the committed state lies in one of the N blocks, N - 1 blocks serve the draft
    reconstruct    one state; per node only its pseudo-value, key and path decay
    replay         as reconstruct, and a trunk of accepted tokens whose state was not written yet
    fused          as reconstruct, and a trunk for the tokens that one tree can accept

What stays between two steps is permanent, what only one verification needs is transient.

    L linear layers  A softmax layers  B batch  N nodes  T trunk slots  HK key heads  HV value heads  K key dim  V value dim
    C convolution channels
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from treewy_inductor.layer_shapes import LAYER_ALIGNMENT, default_flush_every
from treewy_inductor.model_shapes import ModelShape

# As tree.MAX_NODES, which cannot be had without importing torch.
MAX_NODES = 256
POLICIES = ("store_all", "replay", "fused", "reconstruct")
STATE_PARTS = (
    "recurrent state",
    "trunk",
    "states of draft nodes",
    "pseudo-values",
    "keys of draft nodes",
    "key scales",
    "path decays",
)
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}


@dataclass(frozen=True)
class Buffer:
    """One buffer of a cache, or one part of it with a lifetime of its own.

    Attributes:
        name: the attribute of ``TreeCache`` that holds it; parts of one buffer share it.
        part: what it is called in a report.
        shape: whole batch, all layers.
        dtype: name of a torch dtype.
        is_permanent: false if only a verification in flight needs it.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    is_permanent: bool

    @property
    def bytes(self) -> int:
        """Bytes of the whole buffer; what holds numbers of the model holds them by layer."""
        layers, layer = self.shape[0], prod(self.shape[1:]) * ITEM_BYTES[self.dtype]
        alignment = LAYER_ALIGNMENT if "float" in self.dtype else 1
        return layers * -(-layer // alignment) * alignment


def nodes_of_widths(widths: Sequence[int]) -> int:
    """Return the nodes of a tree whose every node of level i has ``widths[i]`` children, its root included.

    ``(1, 1, 1)`` is a chain of 4, ``(3, 3, 3)`` has ``1 + 3 + 9 + 27 = 40``.

    Raises:
        ValueError: for a width below 1, or a tree of more nodes than a cache takes.
    """
    nodes = level = 1
    for i, width in enumerate(widths):
        if width < 1:
            raise ValueError(f"widths[{i}] is {width}, expected at least 1: leave the level out to end the tree")
        level *= width
        nodes += level
    if nodes > MAX_NODES:
        raise ValueError(f"widths {tuple(widths)} make {nodes} nodes, and a tree has at most {MAX_NODES}: use smaller widths")
    return nodes


def state_blocks(policy: str, nodes: int) -> int:
    """Return how many full states a sequence holds per layer under ``policy`` with a tree of ``nodes``."""
    _check_policy(policy)
    return nodes if policy == "store_all" else 1


def cache_buffers(
    model: ModelShape,
    *,
    batch: int,
    nodes: int,
    max_length: int,
    policy: str = "reconstruct",
    dtype: str = "bfloat16",
    state_dtype: str = "float32",
    flush_every: int | None = None,
) -> tuple[Buffer, ...]:
    """Return every buffer that a ``TreeCache`` of these sizes allocates.

    Args:
        nodes: nodes of the largest tree, root included.
        max_length: tokens a row may hold, those of the draft included.
        dtype: of keys, values and convolution; state_dtype: of the recurrent state.
        flush_every: accepted tokens a trunk holds under ``replay``, by default what a cache of these sizes takes; ignored by
            the others.

    Raises:
        ValueError: for an unknown policy.
    """
    _check_policy(policy)
    L, A, B, N = model.linear_layers, model.softmax_layers, batch, nodes
    linear, softmax = model.linear, model.softmax
    T = default_flush_every(nodes, batch * linear.value_heads) if flush_every is None else flush_every
    T = N if policy == "fused" else T
    HK, HV, K, V, C = linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim, linear.conv_channels
    decay = (HV, K) if linear.decay_per_channel else (HV,)
    cached = (A, B, softmax.heads, max_length)
    state = (HV, K, V)

    def permanent(name: str, part: str, shape: tuple[int, ...], of: str) -> Buffer:
        return Buffer(name, part, shape, of, True)

    def transient(name: str, part: str, shape: tuple[int, ...], of: str) -> Buffer:
        return Buffer(name, part, shape, of, False)

    buffers = [
        permanent("history", "convolution history", (L, B, C, linear.conv_kernel), dtype),
        permanent("keys", "keys and values", (*cached, softmax.key_dim), dtype),
        permanent("values", "keys and values", (*cached, softmax.value_dim), dtype),
        permanent("lengths", "lengths", (B,), "int64"),
        transient("conv_inputs", "convolution inputs", (L, B, C, N), dtype),
        transient("tokens", "model inputs", (B, N), "int64"),
        transient("position_ids", "model inputs", (B, N), "int64"),
        transient("layers.row", "model inputs", (A, B, 1), "int64"),
        transient("layers.node", "model inputs", (A, N), "int64"),
        transient("mask", "attention mask", (B, 1, N, max_length), "bool"),
        *(transient(f"encoding.{name}", "tree encoding", shape, of) for name, shape, of in _encoding(B, N, linear.conv_kernel)),
    ]
    if policy == "store_all":
        return (
            permanent("snapshots", "recurrent state", (L, B, 1, *state), state_dtype),
            *buffers,
            transient("snapshots", "states of draft nodes", (L, B, N - 1, *state), state_dtype),
            permanent("accepted", "recurrent state", (B,), "int32"),
        )
    trunk = (
        permanent("trunk_keys", "trunk", (L, B, T, HK, K), dtype),
        permanent("trunk_scale", "trunk", (L, B, T, HK), "float32"),
        permanent("trunk_values", "trunk", (L, B, T, HV, V), "float32"),
        permanent("trunk_decay", "trunk", (L, B, T, *decay), "float32"),
        permanent("trunk_length", "trunk", (B,), "int32"),
    )
    return (
        permanent("state", "recurrent state", (L, B, *state), state_dtype),
        *(trunk if policy == "fused" or (policy == "replay" and T > 1) else ()),
        *buffers,
        transient("pseudo_values", "pseudo-values", (L, B, N, HV, V), "float32"),
        transient("node_keys", "keys of draft nodes", (L, B, N, HK, K), dtype),
        transient("key_scale", "key scales", (L, B, N, HK), "float32"),
        transient("path_decay", "path decays", (L, B, N, *decay), "float32"),
    )


def _encoding(B: int, N: int, convolution: int) -> Iterable[tuple[str, tuple[int, ...], str]]:
    """Yield name, shape and dtype of every tensor of a ``TreeEncoding``."""
    yield "parents", (B, N), "int32"
    yield "ancestors", (B, N, -(-N // 64)), "int64"
    yield "depth", (B, N), "int32"
    yield "window", (B, N, convolution - 1), "int32"
    yield "order", (B, N), "int32"
    yield "internal", (B,), "int32"
    yield "height", (B,), "int32"


def bytes_of(buffers: Iterable[Buffer], *, part: str | None = None, is_permanent: bool | None = None) -> int:
    """Return the bytes of those ``buffers`` that belong to ``part`` and have this lifetime; None means any."""
    return sum(
        buffer.bytes for buffer in buffers if part in (None, buffer.part) and is_permanent in (None, buffer.is_permanent)
    )


def state_bytes(buffers: Iterable[Buffer]) -> int:
    """Return the bytes that depend on the commit policy: the states and whatever stands in for the states of draft nodes."""
    return sum(buffer.bytes for buffer in buffers if buffer.part in STATE_PARTS)


def _check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}: choose one of {', '.join(map(repr, POLICIES))}")
