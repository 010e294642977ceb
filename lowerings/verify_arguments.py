"""What the launches of the verify kernels have in common: tensors and strides by name, results, and what a tile decides."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from treewy_inductor.lowerings.configurations import FusedTile, VerifyTile
from treewy_inductor.lowerings.launch import Launcher, Strided, block, strides


@functools.cache
def has_bulk_prefetch() -> bool:
    """Whether the chip, or the one compiled for where there is none, is an NVIDIA one of capability 9.0 or more."""
    return not torch.version.hip and (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0))


@functools.cache
def is_hopper() -> bool:
    """Whether the chip, or the one compiled for where there is none, has the registers and matrix unit of an H100 or H200."""
    return not torch.version.hip and (not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9)


class Floats(NamedTuple):
    """Float inputs of a verification, by the names that the kernels give them; ``_asdict`` is what a launch takes."""

    query: Strided
    key: Strided
    value: Strided
    log_decay: Strided
    beta: Strided
    state: Strided

    def strides(self) -> dict[str, int]:
        """Return the strides of all that is not contiguous along the last dimension."""
        letters = ("bnh", "bnh", "bnh", "bnh", "bnh", "bhkv")
        return {k: v for each in zip(self._fields, self, letters, strict=True) for k, v in strides(*each).items()}

    def value_terms(self, precision: str) -> int:
        """Return the bfloat16 terms that beta is multiplied with bfloat16 values in, exactly; 0 where values are not.

        A float32 is the sum of three bfloat16.
        """
        if precision != "bf16x3" or self.value.dtype != torch.bfloat16:
            return 0
        return 1 if self.beta.dtype == torch.bfloat16 else 3


class Results(NamedTuple):
    """Outputs of a verification, by the names that the kernels give them."""

    output: Strided
    pseudo_values: Strided
    path_decay: Strided
    key_scale: Strided


def allocate_results(launcher: Launcher, floats: Floats, out_dtype: torch.dtype, into: Sequence[Any]) -> Results:
    """Return where a verification writes; ``into`` gives all but the output, or None for what is to be allocated."""
    B, N, HK, _ = floats.key.shape
    HV, V = floats.value.shape[2:]
    output = launcher.empty((B, N, HV, V), out_dtype, like=floats.key)
    others = (
        launcher.empty(shape, torch.float32, like=floats.key) if buffer is None else launcher.strided(buffer)
        for shape, buffer in zip(((B, N, HV, V), (B, N, HV), (B, N, HK)), into, strict=True)
    )
    return Results(output, *others)


def trunk_tensors(trunk: Sequence[Strided]) -> dict[str, Strided]:
    """Return keys, scales, values, decays and length of a trunk by name."""
    return {f"trunk_{name}": x for name, x in zip(("keys", "scale", "values", "decay", "length"), trunk, strict=True)}


def common_constants(
    floats: Floats, scale: float, norm_eps: float, slots: int, precision: str, solve_precision: str
) -> dict[str, Any]:
    """Return the constants of every kernel that verifies, with ``slots`` of a trunk."""
    _, N, HK, K = floats.key.shape
    HV, V = floats.value.shape[2:]
    return floats.strides() | {
        "N": N,
        "SCALE": scale,
        "NORM_EPS": norm_eps,
        "HK": HK,
        "GROUPS": HV // HK,
        "K": K,
        "V": V,
        "T": slots,
        "BLOCK_K": block(K, 32),
        "PRECISION": precision,
        "SOLVE_PRECISION": "bf16x3" if precision == "bf16x3" else solve_precision,
    }


def tile_constants(tile: VerifyTile | FusedTile, floats: Floats, precision: str, solve_precision: str) -> dict[str, Any]:
    """Return the constants of a kernel that reads tiles of the state with all their keys."""
    K, V, state = floats.key.shape[3], floats.value.shape[3], floats.state
    # Parts that lie in memory as one piece can be asked for by one instruction of Hopper's and later chips.
    is_contiguous = state.stride[2:] == (1, K) and block(K, 32) == K and V % tile.block_v == 0
    return {
        # Those of the tile if they divide the tiles of a head.
        "PARTS": tile.parts if -(-V // tile.block_v) % tile.parts == 0 else 1,
        "BLOCK_V": tile.block_v,
        "IS_FETCHED": tile.is_fetched and is_contiguous and state.device_type == "cuda" and has_bulk_prefetch(),
        "VALUE_TERMS": floats.value_terms(precision),
        "VALUE_PRECISION": solve_precision,
    }
