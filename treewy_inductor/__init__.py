"""Verify trees of draft tokens on hybrids of attention and linear attention, through ``torch.compile(backend="treewy")``.

    import treewy_inductor as treewy

    step = torch.compile(model, backend="treewy", fullgraph=True)
    cache = treewy.TreeCache(model.config, batch_size=4, max_length=4096, max_nodes=64)
    tree = treewy.DraftTree.from_widths((3, 3, 3))

Names are imported when they are first used: torch finds the backend by importing this package, which must not cost the
import of transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treewy_inductor.acceptance import greedy_accept
    from treewy_inductor.captured_step import CapturedStep
    from treewy_inductor.encoding import TreeEncoding
    from treewy_inductor.explanation import explain
    from treewy_inductor.generation import generate
    from treewy_inductor.models.replay_cache import assisted
    from treewy_inductor.models.tree_cache import TreeCache
    from treewy_inductor.tree import DraftTree

__all__ = ["CapturedStep", "DraftTree", "TreeCache", "TreeEncoding", "assisted", "explain", "generate", "greedy_accept"]

# A name here must differ from every module's: importing treewy_inductor.x binds the module as the package's x.
_MODULE_OF = {
    "CapturedStep": "treewy_inductor.captured_step",
    "DraftTree": "treewy_inductor.tree",
    "TreeCache": "treewy_inductor.models.tree_cache",
    "TreeEncoding": "treewy_inductor.encoding",
    "assisted": "treewy_inductor.models.replay_cache",
    "explain": "treewy_inductor.explanation",
    "generate": "treewy_inductor.generation",
    "greedy_accept": "treewy_inductor.acceptance",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
