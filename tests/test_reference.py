"""The closed form against the literal recurrence, the convolution against each path's own, and the commits.

    B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim   C channels   L layers

Both sides compute in the same precision, so their difference is rounding: at most ``eps`` times the length of a sum times
the largest decay sum, whose absolute error becomes a relative one in ``exp``. The bound of each case is written beside it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trees import BRANCHES, CHAIN, FOREST, INERT_BETWEEN, ROOT_ALONE, STAR, batch_of, random_parents
from treewy_inductor import reference
from treewy_inductor.encoding import TreeEncoding

SMALL = [ROOT_ALONE, CHAIN, STAR, BRANCHES, FOREST, INERT_BETWEEN]
NORM_EPS = 1e-6


def inputs_for(
    parents: Tensor, dtype: torch.dtype, *, HK: int = 2, HV: int = 4, K: int = 5, V: int = 3, by_channel: bool = False
) -> dict[str, Any]:
    """Return random arguments of the op, of beta up to 2 and decays between 1 and exp(-2)."""
    B, N = parents.shape
    encoding = TreeEncoding(B, N).fill(parents)
    return {
        "query": torch.randn(B, N, HK, K, dtype=dtype),
        "key": torch.randn(B, N, HK, K, dtype=dtype),
        "value": torch.randn(B, N, HV, V, dtype=dtype),
        "log_decay": -2 * torch.rand(B, N, HV, *((K,) if by_channel else ()), dtype=dtype),
        "beta": 2 * torch.rand(B, N, HV, dtype=dtype),
        "state": torch.randn(B, HV, K, V, dtype=dtype),
        **{name: encoding.tensors()[name] for name in ("ancestors", "order", "internal", "height")},
        "scale": K**-0.5,
        "norm_eps": NORM_EPS,
        "out_dtype": dtype,
    }


def literal(arguments: dict[str, Any], parents: Tensor) -> tuple[Tensor, Tensor]:
    names = ("query", "key", "value", "log_decay", "beta", "state")
    return reference.literal_gated_delta(
        *(arguments[name] for name in names), parents, arguments["scale"], arguments["norm_eps"]
    )


def committed(arguments: dict[str, Any], results: tuple[Tensor, ...], path: Tensor) -> Tensor:
    """Return the state ``[B, HV, K, V]`` after committing ``path`` from the kept rows of one layer."""
    _, u, g, key_scale = results
    state = arguments["state"].clone()[None]
    reference.commit_state(state, arguments["key"][None], key_scale[None], u[None], g[None], path)
    return state[0]


def path_of(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path_of(parents, parents[node]), node]


def paths_to(parents: Tensor, nodes: list[int]) -> Tensor:
    """Return for each row the path to its node, padded with -1 to ``[B, N]``."""
    N = parents.shape[1]
    rows = [path_of(row, node) for row, node in zip(parents.tolist(), nodes, strict=True)]
    return torch.tensor([row + [-1] * (N - len(row)) for row in rows], dtype=torch.int32)


def check_all(arguments: dict[str, Any], parents: Tensor, tolerance: float) -> None:
    """Compare the outputs of all nodes, and the state committed at every node, with the literal recurrence."""
    o, S_of = literal(arguments, parents)
    results = reference.tree_gated_delta(**arguments)
    torch.testing.assert_close(results[0], o, atol=tolerance * float(o.abs().max()), rtol=0)
    for t in range(parents.shape[1]):
        is_real = parents[:, t] != -2
        state = committed(arguments, results, paths_to(parents, [t if real else -1 for real in is_real.tolist()]))
        expected = torch.where(is_real[:, None, None, None], S_of[:, t], arguments["state"])
        torch.testing.assert_close(state, expected, atol=tolerance * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_closed_form_is_the_recurrence_on_small_trees(by_channel: bool, dtype: torch.dtype, tolerance: float) -> None:
    # 9 nodes, sums of 5 and |g| up to 18: eps * 100 leaves room for beta 2, which lets errors grow along a path.
    parents = batch_of(*SMALL)
    check_all(inputs_for(parents, dtype, by_channel=by_channel), parents, tolerance)


@pytest.mark.parametrize("norm_eps", [NORM_EPS, -1.0])
@pytest.mark.parametrize("seed", range(4))
def test_closed_form_is_the_recurrence_on_random_trees(seed: int, norm_eps: float) -> None:
    # Beyond 64 nodes the bitset has two words. Keys as they come have norm about 1 here, which keeps the recurrence stable.
    parents = batch_of(random_parents(67, seed, inert=0.1), random_parents(67, seed + 1))
    arguments = inputs_for(parents, torch.float64, HK=1, HV=2, K=3, V=2) | {"norm_eps": norm_eps}
    arguments["key"] *= 3**-0.5
    arguments["beta"] /= 2
    o, S_of = literal(arguments, parents)
    results = reference.tree_gated_delta(**arguments)
    torch.testing.assert_close(results[0], o, atol=1e-11 * float(o.abs().max()), rtol=0)
    for t in range(0, 67, 11):
        nodes = [t if parents[row, t] != -2 else 0 for row in range(2)]
        state = committed(arguments, results, paths_to(parents, nodes))
        expected = S_of[torch.arange(2), torch.tensor(nodes)]
        torch.testing.assert_close(state, expected, atol=1e-11 * float(expected.abs().max()), rtol=0)


def test_strong_decay_neither_overflows_nor_loses_the_near_past() -> None:
    # |g| reaches 9 * 300: its rounding, 2700 * eps, is the relative error of every decay.
    parents = batch_of(*SMALL)
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-3)):
        arguments = inputs_for(parents, dtype)
        arguments["log_decay"] = torch.where(torch.rand(arguments["log_decay"].shape) < 0.5, -300.0, -0.1).to(dtype)
        check_all(arguments, parents, tolerance)


def test_no_decay_and_beta_of_two_reflect() -> None:
    parents = batch_of(*SMALL)
    arguments = inputs_for(parents, torch.float64)
    arguments["log_decay"].zero_()
    arguments["beta"].fill_(2)
    check_all(arguments, parents, 1e-13)


def test_zero_keys_and_zero_beta_only_decay_the_state() -> None:
    parents = batch_of(CHAIN)
    arguments = inputs_for(parents, torch.float64)
    arguments["key"][:, ::2] = 0
    arguments["beta"][:, 1::2] = 0
    check_all(arguments, parents, 1e-13)
    state = committed(arguments, reference.tree_gated_delta(**arguments), paths_to(parents, [6]))
    decay = arguments["log_decay"].sum(1).exp()
    torch.testing.assert_close(state, decay[..., None, None] * arguments["state"])


def test_low_precision_inputs_are_computed_in_float32() -> None:
    parents = batch_of(*SMALL)
    wide = inputs_for(parents, torch.float32)
    narrow = dict(wide)
    for name in ("query", "key", "value"):
        narrow[name] = wide[name].bfloat16()
        wide[name] = narrow[name].float()
    narrow["out_dtype"] = torch.bfloat16
    expected, results = reference.tree_gated_delta(**wide), reference.tree_gated_delta(**narrow)
    assert torch.equal(results[0], expected[0].bfloat16())
    for kept, same in zip(results[1:], expected[1:], strict=True):
        assert kept.dtype == torch.float32
        assert torch.equal(kept, same)


@pytest.mark.parametrize("poison", [torch.nan, 1e30, torch.inf])
@pytest.mark.parametrize("by_channel", [False, True])
def test_rejected_and_inert_nodes_change_no_surviving_bit(by_channel: bool, poison: float) -> None:
    parents = batch_of([*BRANCHES, -2, -2], [*INERT_BETWEEN, -1, 8, -2])
    # Node 1 and what hangs below it are rejected in the first row; node 3 and below, and the second root, in the second.
    keep = torch.tensor([[1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    clean = inputs_for(parents, torch.float32, by_channel=by_channel)
    poisoned = dict(clean)
    for name in ("query", "key", "value", "log_decay", "beta"):
        mask = keep.reshape(*keep.shape, *(1,) * (clean[name].dim() - 2))
        value = -abs(poison) if name == "log_decay" else poison
        poisoned[name] = torch.where(mask, clean[name], value)
    left, right = reference.tree_gated_delta(**clean), reference.tree_gated_delta(**poisoned)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a[keep], b[keep])
    path = paths_to(parents, [5, 2])
    assert torch.equal(committed(clean, left, path), committed(poisoned, right, path))
    inert = parents == -2
    assert torch.count_nonzero(right[0][inert]) == 0
    assert torch.count_nonzero(right[3][inert]) == 0


def test_row_that_commits_nothing_keeps_its_state_whatever_its_nodes_hold() -> None:
    parents = batch_of(BRANCHES, BRANCHES)
    arguments = inputs_for(parents, torch.float32)
    for name in ("key", "value", "beta", "log_decay"):
        arguments[name][1] = torch.nan
    results = reference.tree_gated_delta(**arguments)
    state = committed(arguments, results, paths_to(parents, [8, -1]))
    assert torch.equal(state[1], arguments["state"][1])
    assert not torch.equal(state[0], arguments["state"][0])


@pytest.mark.parametrize("with_bias", [False, True])
def test_convolution_of_a_node_is_that_of_its_path(with_bias: bool) -> None:
    B, C, K = len(SMALL), 3, 4
    parents = batch_of(*SMALL)
    N = parents.shape[1]
    inputs, history, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((B, C, N), (B, C, K), (C, K)))
    bias = torch.randn(C, dtype=torch.float64) if with_bias else None
    window = TreeEncoding(B, N).fill(parents).window
    result = reference.tree_causal_conv1d(inputs, history, weight, bias, window)
    assert result.stride(1) == 1
    for row, tree in enumerate(parents.tolist()):
        for t, parent in enumerate(tree):
            if parent == -2:
                assert torch.count_nonzero(result[row, :, t]) == 0
                continue
            line = torch.cat([history[row], inputs[row][:, path_of(tree, t)]], 1)
            expected = torch.nn.functional.conv1d(line[None], weight[:, None], bias, groups=C)[0, :, -1]
            torch.testing.assert_close(result[row, :, t], expected, atol=1e-14, rtol=1e-14)


def test_convolution_reads_no_rejected_node() -> None:
    parents = batch_of([*BRANCHES, -2])
    inputs, history, weight = torch.randn(1, 3, 10), torch.randn(1, 3, 4), torch.randn(3, 4)
    window = TreeEncoding(1, 10).fill(parents).window
    clean = reference.tree_causal_conv1d(inputs, history, weight, None, window)
    poisoned = inputs.clone()
    poisoned[..., [1, 3, 4, 6, 7, 8, 9]] = torch.nan
    survivors = [0, 2, 5]
    again = reference.tree_causal_conv1d(poisoned, history, weight, None, window)
    assert torch.equal(again[..., survivors], clean[..., survivors])
    assert torch.count_nonzero(again[..., 9]) == 0


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 7])
def test_committed_history_is_the_end_of_history_and_path(steps: int) -> None:
    L, B, C, K, N = 2, 2, 3, 4, 9
    history, inputs = torch.randn(L, B, C, K), torch.randn(L, B, C, N)
    chosen = [[0, 2, 3, 5, 6, 7, 8][:steps], [0]]
    path = torch.tensor([row + [-1] * (N - len(row)) for row in chosen], dtype=torch.int32)
    expected = torch.stack([torch.cat([history[:, b], inputs[:, b][..., chosen[b]]], -1)[..., -K:] for b in range(B)], 1)
    reference.commit_conv(history, inputs, path)
    assert torch.equal(history, expected)


def test_committed_keys_and_values_stand_in_path_order_and_nothing_else_moves() -> None:
    L, B, H, T, D, N = 2, 3, 2, 20, 4, 9
    keys, values = torch.randn(L, B, H, T, D), torch.randn(L, B, H, T, D + 1)
    old_keys, old_values = keys.clone(), values.clone()
    lengths, chosen = [4, 0, 11], [[0, 2, 5, 8], [], [0, 1]]
    path = torch.tensor([row + [-1] * (N - len(row)) for row in chosen], dtype=torch.int32)
    reference.commit_keys_values(keys, values, torch.tensor(lengths), path)
    for b in range(B):
        source = list(range(T))
        for step, node in enumerate(chosen[b]):
            source[lengths[b] + step] = lengths[b] + node
        assert torch.equal(keys[:, b], old_keys[:, b][:, :, source])
        assert torch.equal(values[:, b], old_values[:, b][:, :, source])


def test_bitset_unpacks_to_the_ancestor_relation() -> None:
    parents = random_parents(130, 3)
    A = reference.unpack_ancestors(TreeEncoding(1, 130).fill(batch_of(parents)).ancestors)[0]
    for t in range(130):
        assert A[t].nonzero().flatten().tolist() == path_of(parents, t)
