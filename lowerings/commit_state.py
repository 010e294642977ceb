"""Launch treewy::commit_state: the accepted nodes' states of all layers in one kernel, in place."""

from __future__ import annotations

from typing import Any

from treewy_inductor.lowerings.commit_state_kernel import commit_state_kernel
from treewy_inductor.lowerings.configurations import CommitTile, commit_tile
from treewy_inductor.lowerings.launch import Launch, Launcher, block, precisions, strides


def launch_commit_state(
    launcher: Launcher,
    state: Any,
    keys: Any,
    key_scale: Any,
    pseudo_values: Any,
    path_decay: Any,
    path: Any,
    *,
    tile: CommitTile | None = None,
) -> None:
    """Overwrite ``state`` ``[L, B, HV, K, V]``, whatever its strides; arguments as :mod:`treewy_inductor.ops` says.

    Args:
        tile: to use in place of that of the table, for measuring.
    """
    S = launcher.strided(state)
    k, u = launcher.strided(keys, contiguous=[4]), launcher.strided(pseudo_values, contiguous=[4])
    k_scale, g = launcher.strided(key_scale, contiguous=[3]), launcher.strided(path_decay, contiguous=[3])
    steps = launcher.strided(path, contiguous=[1])
    L, B, HV, K, V = S.shape
    HK, P = k.shape[3], steps.shape[1]
    precision = precisions([k])[0]
    tile = tile or commit_tile(K, V, precision == "bf16x3")
    launcher.launch(
        Launch(
            commit_state_kernel,
            L * B * HV * -(-V // tile.block_v),
            {"state": S, "keys": k, "key_scale": k_scale, "pseudo_values": u, "path_decay": g, "path": steps},
            strides("state", S, "lbhkv")
            | strides("keys", k, "lbnh")
            | strides("key_scale", k_scale, "lbn")
            | strides("pseudo_values", u, "lbnh")
            | strides("path_decay", g, "lbn")
            | {"B": B, "P": P, "HK": HK, "GROUPS": HV // HK, "K": K, "V": V}
            | {"BLOCK_P": block(P), "BLOCK_V": tile.block_v, "BLOCK_K": block(K, 16), "PRECISION": precision},
            tile.warps,
        )
    )
