"""Launch treewy::commit_conv: the convolution histories of all layers in one kernel, in place."""

from __future__ import annotations

from typing import Any

from treewy_inductor.lowerings.commit_conv_kernel import commit_conv_kernel
from treewy_inductor.lowerings.launch import Launch, Launcher, block, strides

# Channels a program: 4 columns of 256 channels are 8 elements a thread of 4 warps.
BLOCK_C = 256


def launch_commit_conv(launcher: Launcher, history: Any, inputs: Any, path: Any) -> None:
    """Overwrite ``history`` ``[L, B, C, K]``, whatever its strides; arguments as :mod:`treewy_inductor.ops` says."""
    old, new = launcher.strided(history), launcher.strided(inputs)
    steps = launcher.strided(path, contiguous=[1])
    L, B, C, K = old.shape
    P = steps.shape[1]
    launcher.launch(
        Launch(
            commit_conv_kernel,
            L * B * -(-C // BLOCK_C),
            {"history": old, "inputs": new, "path": steps},
            strides("history", old, "lbck")
            | strides("inputs", new, "lbcn")
            | {"B": B, "C": C, "P": P, "K": K, "BLOCK_P": block(P), "BLOCK_C": BLOCK_C, "BLOCK_K": block(K)},
            warps=4,
        )
    )
