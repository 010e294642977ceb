"""Launch treewy::commit_trunk: all layers' trunks and states in one kernel, then the trunks' lengths."""

from __future__ import annotations

from typing import Any

from treewy_inductor.lowerings.commit_trunk_kernel import commit_trunk_kernel, trunk_length_kernel
from treewy_inductor.lowerings.configurations import CommitTile, commit_tile
from treewy_inductor.lowerings.launch import Launch, Launcher, block, precisions, strides


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
    """Overwrite state, trunk and its length; all but ``state`` contiguous: see :mod:`treewy_inductor.ops_replay`.

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
    launcher.launch(
        Launch(
            commit_trunk_kernel,
            L * B * HV * -(-V // tile.block_v),
            {"state": S, "trunk_length": length, "path": steps}
            | dict(zip(("trunk_keys", "trunk_scale", "trunk_values", "trunk_decay"), trunk, strict=True))
            | dict(zip(("keys", "key_scale", "pseudo_values", "path_decay"), nodes, strict=True)),
            strides("state", S, "lbhkv")
            | {"B": B, "N": N, "P": P, "T": T, "HK": HK, "GROUPS": HV // HK, "K": K, "V": V}
            | {"BLOCK_P": block(P), "BLOCK_V": tile.block_v, "BLOCK_K": block(K, 16), "PRECISION": precision},
            tile.warps,
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
