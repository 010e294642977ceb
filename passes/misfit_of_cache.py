"""Say why a cache cannot hold what a proven recurrence leaves behind: its keys, its path decays, or by its policy."""

from __future__ import annotations

import math

from treewy_inductor.passes.deepen_cut import Cut
from treewy_inductor.passes.marked_state import MarkedState


def misfit(marked: MarkedState, cuts: dict[str, Cut], corrects: bool) -> str:
    """Say why the cache cannot hold what was proven; empty if it can."""
    key, kept = cuts["key"], marked.kept_keys
    if not corrects and (kept is None or marked.trunk):
        return 'it is linear attention without a correction: construct the cache with mamba_state_commit="reconstruct"'
    if not corrects and "decay" in cuts and is_vector(marked, cuts["decay"]):
        return "it is linear attention without a correction and with a decay for each key channel, for which there is no op"
    if kept is None:
        return ""
    found = key.node.meta["val"].dtype
    if found.itemsize > kept.dtype.itemsize:
        return (
            f"the key could only be proven in {found}, and the cache keeps keys in {kept.dtype}: "
            "keep keys in the wider dtype, or normalise and cast them in a form that is known"
        )
    if key.heads != kept.shape[2]:
        return (
            f"the key could only be proven with {key.heads} heads, and the cache keeps {kept.shape[2]}: what stands between "
            "the key's own heads and the recurrence is not known; normalise before the heads are repeated"
        )
    decays = marked.buffer("path_decay").meta["val"]
    if "decay" in cuts and is_vector(marked, cuts["decay"]) and decays.dim() == 3:
        return "it has a decay for each key channel, and the cache keeps one for each head"
    return ""


def is_vector(marked: MarkedState, decay: Cut) -> bool:
    """Return whether a decay is one for each key channel."""
    B, N, _, HV, K, _ = marked.sizes
    return K > 1 and math.prod(decay.node.meta["val"].shape) == B * N * HV * K
