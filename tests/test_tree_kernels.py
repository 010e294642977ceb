"""The kernels of verification and commit against the reference, in Triton's interpreter: float32, as it multiplies bfloat16 wrongly.

The interpreter is chosen when a kernel is defined, so each comparison runs in a process of its own. Bounds: products in
float32 carry a few ulp a term, 1e-6 in norm at these sizes, and the reference they meet computes in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.interpreted_checks import outcomes_of
from tests.trees import BRANCHES, CHAIN, FOREST, INERT_BETWEEN, ROOT_ALONE, STAR, batch_of, random_parents
from treewy_inductor import reference
from treewy_inductor.encoding import derive
from treewy_inductor.lowerings.configurations import VerifyTile

SCALE, NORM_EPS = 0.25, 1e-6
# The tile of the table, which streams the state block by block for float32 inputs, and those of bfloat16: all keys at once.
TILES = (None, VerifyTile(64, 4, 32, 2), VerifyTile(64, 4, 32, 2, parts=2))

# Two value heads a program, which trees of at most 16 nodes may have.
TWO_HEADS = (VerifyTile(64, 4, 32, 3, parts=2, heads=2), VerifyTile(64, 4, 32, 2, heads=2))


def arguments(parents: Tensor, HK: int, groups: int, K: int, V: int, seed: int = 0) -> list:
    """Return the arguments of the op in float32 up to ``height``, the state with keys innermost, NaN at inert nodes."""
    torch.manual_seed(seed)
    (B, N), HV = parents.shape, HK * groups
    mixed = torch.randn(B, N, 2 * HK * K + HV * V)
    log_decay, beta = -2 * torch.rand(B, N, HV), 2 * torch.rand(B, N, HV)
    for x in (mixed, log_decay, beta):
        x[parents == -2] = torch.nan
    query, key, value = mixed.split((HK * K, HK * K, HV * V), -1)
    state = torch.randn(B, HV, V, K).transpose(2, 3)
    ancestors, _, _, order, internal, height = derive(parents, 4)
    heads = query.unflatten(-1, (HK, K)), key.unflatten(-1, (HK, K)), value.unflatten(-1, (HV, V))
    return [*heads, log_decay, beta, state, ancestors, order, internal, height]


def check_verify(
    parents: Tensor,
    HK: int = 1,
    groups: int = 2,
    K: int = 32,
    V: int = 32,
    norm_eps: float = NORM_EPS,
    bound: float = 1e-6,
    tiles: tuple[VerifyTile | None, ...] = TILES,
) -> None:
    from treewy_inductor.lowerings.launch import EAGER
    from treewy_inductor.lowerings.tree_gated_delta import launch_tree_gated_delta

    case = arguments(parents, HK, groups, K, V)
    if norm_eps < 0:
        for x in case[:2]:
            x /= x.norm(dim=-1, keepdim=True)
    wide = [x.double() if x.is_floating_point() else x for x in case]
    exact = reference.tree_gated_delta(*wide, SCALE, norm_eps, torch.float64)
    for tile in tiles:
        found = [r.handle for r in launch_tree_gated_delta(EAGER, *case, SCALE, norm_eps, torch.float32, verify=tile)]
        for name, result, expected in zip(("output", "u", "g", "key_scale"), found, exact, strict=True):
            error = float((result.double() - expected).norm() / expected.norm().clamp(min=1e-30))
            assert error < bound, (
                f"{name}: {error:.1e} for {tuple(parents.shape)} nodes, dims {K}/{V}, {groups} value heads a key head, {tile}"
            )


def check_trees() -> None:
    check_verify(batch_of(BRANCHES, FOREST, INERT_BETWEEN, ROOT_ALONE, CHAIN, STAR))


def check_node_counts() -> None:
    for nodes in (1, 2, 15, 16, 17, 33, 65):
        check_verify(batch_of(random_parents(nodes, nodes), random_parents(nodes, nodes + 1, inert=0.2)), groups=1)


def check_deep_chain() -> None:
    # Outputs lose what cancels in sums over 69 ancestors, whose keys crowd into 32 dimensions: a few 1e-6 in any order.
    check_verify(batch_of([*range(-1, 69)]), groups=1, bound=5e-6)


def check_dims_and_heads() -> None:
    for K, V, groups in ((96, 192, 1), (64, 64, 3), (128, 128, 4), (24, 40, 1)):
        check_verify(batch_of(random_parents(20, K)), groups=groups, K=K, V=V)


def check_normalised_inputs() -> None:
    check_verify(batch_of(BRANCHES, STAR), norm_eps=-1.0)


def check_two_heads_a_program() -> None:
    trees = batch_of(BRANCHES, FOREST, INERT_BETWEEN, ROOT_ALONE, CHAIN, STAR)
    for groups, K, V in ((2, 32, 128), (4, 96, 256), (2, 40, 100)):
        check_verify(trees, HK=2, groups=groups, K=K, V=V, tiles=TWO_HEADS)
    check_verify(batch_of(random_parents(16, 1), random_parents(16, 2, inert=0.2)), V=128, tiles=TWO_HEADS)


def check_values_innermost() -> None:
    from treewy_inductor.lowerings.launch import EAGER
    from treewy_inductor.lowerings.tree_gated_delta import launch_tree_gated_delta

    case = arguments(batch_of(BRANCHES), 1, 2, 32, 32)
    for tile in TILES[:2]:
        by_keys = launch_tree_gated_delta(EAGER, *case, SCALE, NORM_EPS, torch.float32, verify=tile)
        case[5] = case[5].contiguous()
        by_values = launch_tree_gated_delta(EAGER, *case, SCALE, NORM_EPS, torch.float32, verify=tile)
        assert all(torch.equal(a.handle, b.handle) for a, b in zip(by_keys, by_values, strict=True))
        case[5] = case[5].transpose(2, 3).contiguous().transpose(2, 3)


def check_inert_nodes() -> None:
    from treewy_inductor.lowerings.launch import EAGER
    from treewy_inductor.lowerings.tree_gated_delta import launch_tree_gated_delta

    # As they are one block, with leaves one block and more.
    one_block = batch_of(INERT_BETWEEN, BRANCHES)
    more = batch_of([*INERT_BETWEEN, *[0] * 12], random_parents(20, 3, inert=0.3), [-2] * 20)
    for parents, tiles in ((one_block, (*TILES[:2], TWO_HEADS[1])), (more, TILES[:2])):
        for tile in tiles:
            results = []
            for held in (1e30, torch.nan):
                case = arguments(parents, 1, 2, 32, 32)
                for x in case[:5]:
                    x[parents == -2] = held
                found = launch_tree_gated_delta(EAGER, *case, SCALE, NORM_EPS, torch.float32, verify=tile)
                results.append([r.handle for r in found])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            assert all((x[parents == -2] == 0).all() for x in results[0])


def check_commits() -> None:
    from treewy_inductor.lowerings.commit_conv import launch_commit_conv
    from treewy_inductor.lowerings.commit_keys_values import launch_commit_keys_values
    from treewy_inductor.lowerings.commit_state import launch_commit_state
    from treewy_inductor.lowerings.launch import EAGER

    L, B, N, HK, HV, K, V = 2, 4, 20, 2, 4, 24, 40
    path = torch.full((B, N), -1, dtype=torch.int32)
    path[0, :18], path[1, :3], path[2, 0] = torch.arange(18), torch.tensor([0, 4, 7]), 0
    state = torch.randn(L, B, HV, V, K).transpose(3, 4)
    keys, scale = torch.randn(L, B, N, HK, K), torch.rand(L, B, N, HK)
    u, g = torch.randn(L, B, N, HV, V), -torch.rand(L, B, N, HV)
    for x in (keys, scale, u, g):
        x[:, 1, 3] = torch.nan
        x[:, 3] = torch.nan
    exact = state.double()
    reference.commit_state(exact, keys.double(), scale.double(), u.double(), g.double(), path)
    untouched = state[:, 3].clone()
    launch_commit_state(EAGER, state, keys, scale, u, g, path)
    assert float((state - exact).norm() / exact.norm()) < 1e-6
    assert torch.equal(state[:, 3], untouched)

    history, inputs = torch.randn(L, B, 37, 4), torch.randn(L, B, N, 37).transpose(2, 3)
    cached_keys, cached_values = torch.randn(L, B, 2, 30, 24), torch.randn(L, B, 2, 30, 16)
    lengths = torch.tensor([5, 0, 9, 10])
    expected = [x.clone() for x in (history, cached_keys, cached_values)]
    reference.commit_conv(expected[0], inputs, path)
    reference.commit_keys_values(expected[1], expected[2], lengths, path)
    launch_commit_conv(EAGER, history, inputs, path)
    launch_commit_keys_values(EAGER, cached_keys, cached_values, lengths, path)
    for found, wanted in zip((history, cached_keys, cached_values), expected, strict=True):
        assert torch.equal(found, wanted)


CHECKS = (
    check_trees,
    check_node_counts,
    check_deep_chain,
    check_dims_and_heads,
    check_normalised_inputs,
    check_two_heads_a_program,
    check_values_innermost,
    check_inert_nodes,
    check_commits,
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of(__name__)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_kernel_equals_reference(check: str, outcomes: dict[str, str]) -> None:
    assert outcomes[check] == "", outcomes[check]
