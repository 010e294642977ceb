"""Draft trees that the tests share, as parents; and random ones."""

from __future__ import annotations

import random

import torch
from torch import Tensor

ROOT_ALONE = [-1]
CHAIN = [-1, 0, 1, 2, 3, 4, 5]
STAR = [-1, 0, 0, 0, 0, 0, 0]
BRANCHES = [-1, 0, 0, 1, 1, 2, 3, 3, 6]
FOREST = [-1, 0, -1, 2, 0, 2, 5, -1]
INERT_BETWEEN = [-1, -2, 0, 0, -2, 3, 5, -2]


def random_parents(nodes: int, seed: int, *, inert: float = 0.0, roots: float = 0.05) -> list[int]:
    """Return parents of a seeded random tree in which node 0 is a root and some nodes are inert or further roots.

    Half of the seeds prefer late parents, which makes deep trees; the other half choose among all, which makes flat ones.
    """
    chance = random.Random(seed)
    parents = [-1]
    for t in range(1, nodes):
        real = [i for i in range(t) if parents[i] != -2]
        if chance.random() < inert:
            parents.append(-2)
        elif chance.random() < roots:
            parents.append(-1)
        else:
            parents.append(chance.choice(real[-3:] if seed % 2 else real))
    return parents


def batch_of(*trees: list[int]) -> Tensor:
    """Return the trees as ``[B, N]`` int32, the shorter ones padded with inert nodes."""
    nodes = max(map(len, trees))
    return torch.tensor([tree + [-2] * (nodes - len(tree)) for tree in trees], dtype=torch.int32)
