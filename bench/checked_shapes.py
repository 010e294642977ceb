"""Where ``python -m bench.kernels --tune`` checks the table's own tiles: every shape that is machine code of its own.

tests/test_configurations.py holds this list against what the host wrappers launch for all numbers of nodes and many of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bench.kernel_cases import Shape

# Of every size that the kernels and the compiler tell apart: words of 64 nodes, slots, blocks of a path, and numbers that 16
# divides. Up to 64 nodes the way also depends on whether more than 16 have children.
SMALL_TREES = ("chain1", "chain2", "chain4", "chain7", "wide13", "chain16")
FEW_INTERNAL = ("leafy24", "leafy32", "leafy40", "leafy48", "leafy60", "leafy64")
MANY_INTERNAL = ("chain24", "chain32", "chain40", "chain48", "chain60", "chain64")
LARGE_TREES = ("wide100", "chain128", "wide150", "chain192", "wide250", "chain256")
TRUNK = 16
DIMS = ((128, 128), (64, 64), (96, 192), (256, 256))
# Rows of small trees, whose tile depends on how many states run at once: one, few, more than that, and so many that they do
# even with two value heads a program.
ROWS = (1, 3, 12, 80)
# Of others few and many; where the way by blocks is taken, the compiler tells 1, and numbers that 16 divides, from the rest.
FEW_AND_MANY = (3, 12)
KINDS_OF_ROWS = (1, 3, 16)


class Check(NamedTuple):
    """A tree, shape and number of rows, with a trunk of ``slots`` above the tree if there are any."""

    tree: str
    shape: Shape
    slots: int = 0
    batch: int = 3


def all_kinds() -> list[tuple[Shape, int]]:
    """Return every shape, each with the slots of a trunk."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    kinds = [(Shape(K=K, V=V, dtype=dtype), 0) for K, V in DIMS for dtype in dtypes]
    return [*kinds, (Shape(state_dtype=torch.bfloat16), 0), (Shape(), TRUNK)]


def all_checks() -> list[Check]:
    """Return every check."""
    rows = dict.fromkeys(SMALL_TREES, ROWS) | dict.fromkeys(FEW_INTERNAL, FEW_AND_MANY)
    rows |= dict.fromkeys((*MANY_INTERNAL, *LARGE_TREES), KINDS_OF_ROWS)
    checks = [Check(tree, *kind, batch) for kind in all_kinds() for tree, batches in rows.items() for batch in batches]
    for groups in (1, 3, 4):
        trees = [("wide13", batch) for batch in ROWS] + [(tree, 3) for tree in ("leafy40", "chain40", "wide100")]
        checks += [Check(tree, Shape(groups=groups), batch=batch) for tree, batch in trees]
    return checks


def fused_checks() -> list[Check]:
    """Return every check of a commit fused with the next verification; beyond 16 nodes its own kernel only folds a trunk."""
    kinds = [(shape, slots) for shape, slots in all_kinds() if not slots]
    trees = [(tree, 3) for tree in (*SMALL_TREES, "leafy40")] + [("wide13", batch) for batch in ROWS if batch != 3]
    heads = [Check("wide13", Shape(groups=groups)) for groups in (1, 3, 4)]
    return [Check(tree, *kind, batch) for kind in kinds for tree, batch in trees] + heads
