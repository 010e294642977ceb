"""Launch treewy::commit_keys_values: the attention caches of all layers in one kernel, in place."""

from __future__ import annotations

from typing import Any

from treewy_inductor.lowerings.commit_keys_values_kernel import commit_keys_values_kernel
from treewy_inductor.lowerings.launch import Launch, Launcher, block, strides


def launch_commit_keys_values(launcher: Launcher, keys: Any, values: Any, lengths: Any, path: Any) -> None:
    """Overwrite rows of ``keys``, ``values`` ``[L, B, H, T, D]`` of any strides; see :mod:`treewy_inductor.ops`."""
    k, v = launcher.strided(keys), launcher.strided(values)
    steps = launcher.strided(path, contiguous=[1])
    L, B, H, T, D = k.shape
    P, E = steps.shape[1], v.shape[4]
    launcher.launch(
        Launch(
            commit_keys_values_kernel,
            L * B * H,
            {"keys": k, "values": v, "lengths": launcher.strided(lengths), "path": steps},
            strides("keys", k, "lbhtd")
            | strides("values", v, "lbhtd")
            | {"B": B, "H": H, "T": T, "P": P, "D": D, "E": E}
            | {"BLOCK_P": block(P), "BLOCK_D": block(D), "BLOCK_E": block(E)},
            warps=4,
        )
    )
