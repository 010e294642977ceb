"""The closed form follows from the recurrence: shown by sympy, with symbols for every number of a small tree.

    recurrence    S_t = a_t (I - b_t k_t k_t^T) S_p(t) + b_t k_t v_t^T                 o_t = S_t^T q_t
    closed form   (I + G) U = R                 G[t,i] = b_t a(i,t] (k_t . k_i)        R[t] = b_t (v_t - a(root,t] S_0^T k_t)
                  S_t = a(root,t] S_0 + sum over i in A(t) of a(i,t] k_i u_i^T

``a(i,t]`` is the product of the decays after i up to t: ``exp(g_t - g_i)`` in the code, which sums their logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import sympy as sp

from tests.trees import CHAIN, FOREST

K, V = 2, 1
FORK = [-1, 0, 0, 2]
TREES = {"chain": CHAIN[:4], "fork": FORK, "forest": FOREST[:4], "star": [-1, 0, 0, 0]}


@dataclass
class Symbols:
    """Symbols of a tree: ``S`` ``[K, V]``, and for each node ``k q`` ``[K]``, ``v`` ``[V]``, ``b``, ``a`` (scalar or ``[K, K]``)."""

    parents: list[int]
    by_channel: bool = False

    def __post_init__(self) -> None:
        nodes = range(len(self.parents))
        self.S = sp.Matrix(K, V, lambda i, j: sp.Symbol(f"S{i}{j}"))
        self.k, self.q = (
            [sp.Matrix(K, 1, lambda i, _, t=t, name=name: sp.Symbol(f"{name}{t}{i}")) for t in nodes] for name in "kq"
        )
        self.v = [sp.Matrix(V, 1, lambda i, _, t=t: sp.Symbol(f"v{t}{i}")) for t in nodes]
        self.b = [sp.Symbol(f"b{t}") for t in nodes]
        channels = [[sp.Symbol(f"a{t}{i}") for i in range(K)] if self.by_channel else [sp.Symbol(f"a{t}")] * K for t in nodes]
        self.a = [sp.diag(*row) for row in channels]

    def path(self, t: int) -> list[int]:
        return [] if t < 0 else [*self.path(self.parents[t]), t]

    def decay_after(self, i: int, t: int) -> sp.Matrix:
        """Return the product of the decays after ``i`` up to ``t``; ``i = -1`` is the committed state."""
        product = sp.eye(K)
        for node in self.path(t):
            if node not in self.path(i):
                product = product * self.a[node]
        return product

    def literal_states(self) -> list[sp.Matrix]:
        states: list[sp.Matrix] = []
        for t, parent in enumerate(self.parents):
            before = self.a[t] * (self.S if parent < 0 else states[parent])
            k, b = self.k[t], self.b[t]
            states.append((sp.eye(K) - b * k * k.T) * before + b * k * self.v[t].T)
        return states

    def pseudo_values(self) -> list[sp.Matrix]:
        """Solve ``(I + G) U = R`` by the neutral element and the nilpotent powers of ``G``."""
        N = len(self.parents)
        G = sp.zeros(N, N)
        R = sp.zeros(N, V)
        for t in range(N):
            for i in self.path(t)[:-1]:
                G[t, i] = self.b[t] * (self.k[t].T * self.decay_after(i, t) * self.k[i])[0]
            R[t, :] = self.b[t] * (self.v[t] - (self.decay_after(-1, t) * self.S).T * self.k[t]).T
        levels = max(len(self.path(t)) for t in range(N))
        assert (G**levels).is_zero_matrix
        inverse, power, reached = sp.eye(N) - G, G * G, 2
        while reached < levels:
            inverse, power, reached = inverse * (sp.eye(N) + power), power * power, 2 * reached
        return [(inverse * R)[t, :].T for t in range(N)]


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_states_and_outputs_are_equal_as_polynomials(name: str, by_channel: bool) -> None:
    tree = Symbols(TREES[name], by_channel)
    literal, u = tree.literal_states(), tree.pseudo_values()
    for t in range(len(tree.parents)):
        closed = tree.decay_after(-1, t) * tree.S
        for i in tree.path(t):
            closed += tree.decay_after(i, t) * tree.k[i] * u[i].T
        assert (closed - literal[t]).expand().is_zero_matrix
        assert ((closed - literal[t]).T * tree.q[t]).expand().is_zero_matrix


def test_pseudo_value_is_the_correction_that_its_name_says() -> None:
    tree = Symbols(FORK)
    literal, u = tree.literal_states(), tree.pseudo_values()
    for t, parent in enumerate(tree.parents):
        before = tree.S if parent < 0 else literal[parent]
        expected = tree.b[t] * (tree.v[t] - (tree.a[t] * before).T * tree.k[t])
        assert (u[t] - expected).expand().is_zero_matrix


def test_beta_twice_in_the_matrix_is_wrong() -> None:
    tree = Symbols([-1, 0])
    _, u = tree.pseudo_values()
    with_square = u.subs(tree.b[1], tree.b[1] ** 2)
    literal = tree.b[1] * (tree.v[1] - (tree.a[1] * tree.literal_states()[0]).T * tree.k[1])
    assert (u - literal).expand().is_zero_matrix
    assert not (with_square - literal).expand().is_zero_matrix
