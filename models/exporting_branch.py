"""Let Dynamo see whether a model is really being exported, since transformers writes its chunk rule in two ways.

Some export targets have no triangular solve, so there transformers solves by a loop over the 64 rows of a chunk. Dynamo of
torch 2.11 answers "exporting" whenever it traces, and the loop triples what it traces of a model with such layers: on 24 layers
most of the first compile. Later versions of torch answer as :func:`treewy_inductor.compat.is_exporting` does. What a graph
computes is the same either way.
"""

from __future__ import annotations

import functools

import torch
from transformers.utils import import_utils

from treewy_inductor import compat


@functools.cache
def trace_the_ordinary_branch() -> None:
    """Make ``transformers.utils.is_torchdynamo_exporting()`` traced as torch's own flag, once a process."""
    asked = getattr(import_utils, "is_torchdynamo_exporting", None)
    if asked is not None:
        torch._dynamo.substitute_in_graph(asked)(compat.is_exporting)
