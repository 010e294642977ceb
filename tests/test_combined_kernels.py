"""The combined ops' kernels against their reference, in Triton's interpreter: float32, as it multiplies bfloat16 wrongly.

Bound: a few ulp a term; the references compute in float64.
"""

from __future__ import annotations

import pytest
import torch

from tests.interpreted_checks import outcomes_of
from tests.trees import BRANCHES, FOREST, INERT_BETWEEN, ROOT_ALONE, batch_of, random_parents
from treewy_inductor import ops_combined
from treewy_inductor.encoding import derive


def check_convolution() -> None:
    from treewy_inductor.lowerings.launch import EAGER
    from treewy_inductor.lowerings.tree_conv_silu import launch_tree_conv_silu

    many = batch_of(random_parents(65, 0), random_parents(65, 1, inert=0.3))
    for parents in (batch_of(BRANCHES, FOREST, INERT_BETWEEN, ROOT_ALONE), many, batch_of([-2, -2], [-1, 0])):
        for C, K, tile in ((5, 4, None), (70, 4, (4, 16, 8, 4)), (64, 2, (2, 64, 2, 4)), (3, 3, (16, 128, 64, 4))):
            B, N = parents.shape
            window = derive(parents, K)[2]
            inputs, history = torch.randn(B, N, C), torch.randn(B, K, C)
            inputs[parents == -2] = torch.nan
            for bias in (None, torch.randn(C)):
                # Channels innermost, as a model's projection leaves them, and outermost; a history as the cache holds it.
                for x in (inputs.transpose(1, 2), inputs.transpose(1, 2).contiguous()):
                    case = x, history.transpose(1, 2).contiguous(), torch.randn(C, K), bias, window
                    wide = [each.double() if each is not None and each.is_floating_point() else each for each in case]
                    for part in ((0, 0, 0), (1, 2, C // 3), (0, 1, C)):
                        exact, _, again = ops_combined.convolve_and_activate(*wide, *part)  # type: ignore[arg-type]
                        output, kept, found = launch_tree_conv_silu(EAGER, *case, *part, tile=tile)
                        torch.testing.assert_close(found.handle.double(), again, rtol=2e-6, atol=2e-6)
                    torch.testing.assert_close(output.handle.double(), exact.transpose(1, 2), rtol=2e-6, atol=2e-6)
                    assert torch.equal(kept.handle.nan_to_num(7), inputs.nan_to_num(7))


def check_inputs_are_kept_in_a_buffer() -> None:
    from treewy_inductor.lowerings.launch import EAGER
    from treewy_inductor.lowerings.tree_conv_silu import launch_tree_conv_silu

    parents = batch_of(BRANCHES, FOREST)
    B, N = parents.shape
    inputs, history = torch.randn(B, N, 6).transpose(1, 2), torch.randn(B, 6, 4)
    buffer, keys = torch.zeros(3, B, N, 6), torch.zeros(3, B, N, 2, 2)
    output, *_ = launch_tree_conv_silu(
        EAGER,
        *(inputs, history, torch.randn(6, 4), None, derive(parents, 4)[2], 2, 2, 2),
        into=(buffer[1].transpose(1, 2), keys[1]),
    )
    assert torch.equal(buffer[1], inputs.transpose(1, 2)) and not buffer[::2].any()
    assert torch.equal(keys[1], output.handle[..., 2:].view(B, N, 2, 2)) and not keys[::2].any()


def check_best_token() -> None:
    from treewy_inductor.lowerings.best_token import launch_best_token
    from treewy_inductor.lowerings.launch import EAGER

    for size in (1, 5, 100, 5000, 70000):
        # Few different values, so that many are the largest.
        logits = torch.randint(0, 9, (3, 4, size)).float()
        logits[0, 0, size // 2] = torch.nan
        logits[0, 1], logits[0, 2, -1], logits[0, 3], logits[1, 0, size // 3 :] = -torch.inf, torch.inf, torch.nan, torch.nan
        for tile in (None, (3, 16, 4, 1), (2, 64, 4, 2), (1, 256, 4, 3)):
            if size < 10000 or tile is None:
                assert torch.equal(launch_best_token(EAGER, logits, tile=tile).handle, logits.argmax(-1)), (size, tile)


def check_narrow_products() -> None:
    from treewy_inductor.lowerings.launch import EAGER
    from treewy_inductor.lowerings.narrow_products import launch_narrow_products

    for M, R, n, m in ((37, 300, 5, 32), (1, 256, 64, 64), (64, 1000, 16, 1)):
        x, left, right = torch.randn(M, R), torch.randn(n, R).T, torch.randn(R, m)
        exact = torch.cat([x.double() @ left.double(), x.double() @ right.double()], 1)
        for tile in (None, (16, 3, 32, 4, 2), (32, 1, 64, 4, 1), (64, 7, 128, 4, 1)):
            found = launch_narrow_products(EAGER, x, left, right, tile=tile).handle.double().sum(0)
            assert float((found - exact).norm() / exact.norm()) < 1e-6, (M, R, tile)


CHECKS = (check_convolution, check_inputs_are_kept_in_a_buffer, check_best_token, check_narrow_products)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of(__name__)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_kernel_equals_reference(check: str, outcomes: dict[str, str]) -> None:
    assert outcomes[check] == "", outcomes[check]
