"""Register the package's lowerings with Inductor; an op without one on a device runs as it does eagerly."""

from __future__ import annotations

import importlib.util

from treewy_inductor import compat, ops
from treewy_inductor.lowerings.tree_causal_conv1d import lower_tree_causal_conv1d


def register_lowerings() -> None:
    """Tell Inductor how to lower each op. Called by the backend before its first compile."""
    compat.register_lowering(ops.tree_causal_conv1d, lower_tree_causal_conv1d)
    if importlib.util.find_spec("triton") is not None:
        from treewy_inductor.lowerings.on_gpu import register_once

        register_once()
