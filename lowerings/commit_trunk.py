"""Launch treewy::commit_trunk: all layers' rows that fold, those that append, then the trunks' lengths."""

from __future__ import annotations

from typing import Any

import torch

from treewy_inductor.lowerings.append_trunk_kernel import append_trunk_kernel, trunk_length_kernel
from treewy_inductor.lowerings.configurations import CommitTile, commit_tile
from treewy_inductor.lowerings.fold_trunk_kernel import fold_trunk_kernel
from treewy_inductor.lowerings.launch import Launch, Launcher, block, precisions, strides

# Programs that a fold has at least, if it can: beyond, each takes more, since most only find that their row does not fold.
FOLD_PROGRAMS = 16384
# Value channels that a program appends.
APPENDED = 1024


def launch_commit_trunk(
    launcher: Launcher,
    state: Any,
    trunk_keys: Any,
    trunk_scale: Any,
    trunk_values: Any,
    trunk_decay: Any,
    trunk_length: Any,
    keys: Any,
    key_scale: Any,
    pseudo_values: Any,
    path_decay: Any,
    path: Any,
    *,
    tile: CommitTile | None = None,
) -> None:
    """Overwrite state, trunk and its length, see :mod:`treewy_inductor.ops_replay`; layers, but for ``state``, are contiguous.

    Args:
        tile: to use in place of that of the table, for measuring.
    """
    S, length, steps = launcher.strided(state), launcher.strided(trunk_length), launcher.strided(path)
    trunk = [launcher.strided(x) for x in (trunk_keys, trunk_scale, trunk_values, trunk_decay)]
    nodes = [launcher.strided(x) for x in (keys, key_scale, pseudo_values, path_decay)]
    L, B, HV, K, V = S.shape
    N, HK, T, P = nodes[0].shape[2], nodes[0].shape[3], trunk[0].shape[2], steps.shape[1]
    precision = precisions([nodes[0]])[0]
    tile = tile or commit_tile(K, V, precision == "bf16x3")
    units, blocks = 1, HV * -(-V // tile.block_v)
    while blocks % (2 * units) == 0 and L * B * blocks // (2 * units) >= FOLD_PROGRAMS:
        units *= 2
    layered = dict(zip(("trunk_keys", "trunk_scale", "trunk_values", "trunk_decay"), trunk, strict=True)) | dict(
        zip(("keys", "key_scale", "pseudo_values", "path_decay"), nodes, strict=True)
    )
    tensors = layered | {"trunk_length": length, "path": steps}
    sizes: dict[str, Any] = {f"{name}_l": x.stride[0] for name, x in layered.items()}
    sizes |= {"B": B, "N": N, "P": P, "T": T, "HK": HK, "K": K, "V": V, "BLOCK_P": block(P)}
    launcher.launch(
        Launch(
            fold_trunk_kernel,
            L * B * (blocks // units),
            {"state": S} | tensors,
            strides("state", S, "lbhkv")
            | sizes
            | {"GROUPS": HV // HK, "UNITS": units, "BLOCK_V": tile.block_v, "BLOCK_K": block(K, 16), "PRECISION": precision},
            tile.warps,
            # A row that folds waits for memory: one more program a multiprocessor.
            registers=None if torch.version.hip else 128,
        )
    )
    programs = -(-HV * V // APPENDED)
    launcher.launch(
        Launch(
            append_trunk_kernel,
            L * B * programs,
            tensors,
            sizes
            | {"HV": HV, "BLOCK_U": APPENDED, "BLOCK_K": block(-(-HK * K // programs)), "BLOCK_HV": block(HV)}
            | {"BLOCK_HK": block(HK)},
            4,
        )
    )
    launcher.launch(
        Launch(
            trunk_length_kernel,
            B,
            {"trunk_length": length, "path": steps},
            {"P": P, "T": T, "BLOCK_P": block(P)},
            1,
        )
    )
