"""What bench.kernels times is judged first: right kernels pass, and a wrong element, a NaN or bits that move are seen."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bench.kernel_cases import Shape, arguments, float64_results
from bench.planned_commit import STATE_BOUND, PlannedCommit, longest_path, path_tensor
from bench.planned_fused import PlannedFused
from bench.planned_verify import PlannedVerify
from tests.interpreted_checks import outcomes_of

TREE = [-1, 0, 0, 1, 1, 3]
# The interpreter cuts bfloat16 off where a GPU rounds.
SHAPE = Shape(HK=2, groups=2, K=32, V=32, dtype=torch.float32)


def spoilt(planned: PlannedVerify, result: int, by: list[float]) -> PlannedVerify:
    """Return ``planned`` with something added to the last element of a result after each run, another each time."""
    right, amounts = planned.run, iter(by)

    def run() -> None:
        right()
        planned.results[result].view(-1)[-1] += next(amounts)

    planned.run = run
    return planned


def check_right_kernels_pass() -> None:
    case = arguments(TREE, 3, SHAPE, device="cpu")
    judgement = PlannedVerify(case).judge(float64_results(case))
    assert judgement.is_right and judgement.same_bits, judgement


def check_wrong_results_are_seen() -> None:
    case = arguments(TREE, 3, SHAPE, device="cpu")
    exact = float64_results(case)
    for result in range(4):
        for amounts in ([1.0, 1.0], [float("nan")] * 2, [0.0, float("nan")]):
            judgement = spoilt(PlannedVerify(case), result, amounts).judge(exact)
            assert not judgement.is_right, f"result {result} off by {amounts}: {judgement}"


def check_bits_that_move_are_seen() -> None:
    case = arguments(TREE, 3, SHAPE, device="cpu")
    judgement = spoilt(PlannedVerify(case), 1, [0.0, 1e-6]).judge(float64_results(case))
    assert not judgement.same_bits and not judgement.is_right, judgement


def check_commits() -> None:
    case = arguments(TREE, 3, SHAPE, device="cpu")
    verified = PlannedVerify(case)
    verified.run()
    path = path_tensor(TREE, case)
    assert path.tolist() == [[0, 1, 3, 5, -1, -1]] * 3
    before = case[5].clone()
    assert PlannedCommit(case, verified, path).judge() <= STATE_BOUND
    assert not torch.equal(case[5], before)
    verified.results[1][2, 5] += 1e-2
    planned = PlannedCommit(case, verified, path)
    planned.stacked[3] = planned.stacked[3] - 1e-2
    assert planned.judge() > STATE_BOUND


def check_fused_steps() -> None:
    case = arguments(TREE, 3, SHAPE, device="cpu")
    planned, before = PlannedFused(case, 4), case[5].clone()
    assert max(planned.judge()) <= 1e-6
    assert not torch.equal(case[5], before)
    planned.trunk[2][2, 3] += 1e-2
    exact = planned._exact()
    planned.trunk[2][2, 3] -= 1e-2
    planned._exact = lambda: exact  # type: ignore[method-assign]
    assert planned.judge()[4] > STATE_BOUND


CHECKS = (
    check_right_kernels_pass,
    check_wrong_results_are_seen,
    check_bits_that_move_are_seen,
    check_commits,
    check_fused_steps,
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of(__name__)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_in_the_interpreter(outcomes: dict[str, str], check: str) -> None:
    assert outcomes[check] == ""


def test_the_longest_path_ends_at_the_deepest_node() -> None:
    assert longest_path(TREE) == [0, 1, 3, 5]
