"""What bench.step says of samples that were timed in turns."""

from __future__ import annotations

import random

import pytest

from bench.step import TURNS, time_in_turns
from bench.step_process import Job
from bench.step_report import row_of
from bench.turns import Side


class Process:
    """What a report reads of a StepProcess."""

    def __init__(self, kind: str, turns: list[list[float]] | None) -> None:
        self.job, self.error, self.found = Job(kind, "4B", 1, 64), "", {}
        if turns is not None:
            side = Side.of(turns)
            self.found = side.quantiles | {"drift": side.drift, "turns": side.medians, "compile_s": 1.0, "compiled_beside": 0}


def noisy(middle: float, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [middle + draw.uniform(-1, 1) for _ in range(31)]


def test_quantiles_fall_between_samples() -> None:
    side = Side.of([[4.0, 1.0], [3.0, 2.0]])
    assert [side.quantiles[name] for name in ("p25", "us", "p75")] == [1.75, 2.5, 3.25]
    assert side.medians == [2.5, 2.5]
    assert set(Side.of([[7.0]]).quantiles.values()) == {7.0}


def test_noise_inside_turns_is_no_drift_and_a_shift_between_them_is() -> None:
    assert Side.of([noisy(100, seed) for seed in range(6)]).drift < 0.01
    assert Side.of([noisy(100), noisy(100, 1), noisy(120, 2)]).drift == pytest.approx(0.2, abs=0.02)


def test_a_second_mode_that_comes_in_some_turns_is_drift() -> None:
    both = [100.0] * 20 + [140.0] * 11
    assert Side.of([[100.0] * 31, both]).drift == pytest.approx(0.4)


def test_ratios_pair_what_was_timed_together() -> None:
    row = row_of([Process("decode", [[10.0], [20.0]]), Process("step", [[10.0], [30.0]])], 2)  # type: ignore[list-item]
    assert row["step_over_decode_turns"] == [1.0, 1.5]


@pytest.mark.parametrize(("step", "token"), [(False, False), (True, False), (False, True)])
def test_a_ratio_stands_only_where_both_sides_lay_still(step: bool, token: bool) -> None:
    still, wandering = [noisy(100), noisy(100, 1)], [noisy(100), noisy(130, 1)]
    row = row_of([Process("decode", wandering if token else still), Process("step", wandering if step else still)], 0.1)  # type: ignore[list-item]
    assert (row["step_over_decode"] is None) == (step or token)
    if step or token:
        assert ("the step's" if step else "the baseline's") in row["step_over_decode_unknown"]
    else:
        assert row["step_over_decode"] == pytest.approx(1, abs=0.01)
    low, high = row["step_over_decode_turns"]
    assert low <= row["step_us"] / row["decode_us"] <= high or step or token


def test_a_side_that_was_not_timed_has_no_ratio() -> None:
    assert "step_over_decode" not in row_of([Process("decode", None), Process("step", [noisy(1)])], 0.1)  # type: ignore[list-item]


class Timed(Process):
    """A process whose samples are given, one middle for each turn; it fails when they are used up."""

    def __init__(self, kind: str, middles: list[float]) -> None:
        super().__init__(kind, None)
        self.middles = list(middles)

    def ask(self, request: str, steps: int) -> list[float] | None:
        assert request == "time_runs"
        return [self.middles.pop(0)] * steps if self.middles else None


def test_a_drifting_measurement_is_repeated_and_the_stiller_one_kept() -> None:
    still, wandering = [100.0] * TURNS, [100.0, 150.0] * (TURNS // 2)
    for first, second in ((wandering, still), (wandering, [100.0, 130.0] * (TURNS // 2))):
        sides = [Timed("decode", still * 2), Timed("step", first + second)]
        time_in_turns(sides)  # type: ignore[arg-type]
        assert not sides[1].middles
        assert sides[1].found["turns"] == second


def test_nothing_is_repeated_where_both_lie_still_and_nothing_kept_of_a_side_that_failed() -> None:
    sides = [Timed("decode", [9.0] * 2 * TURNS), Timed("step", [8.0] * 2 * TURNS)]
    time_in_turns(sides)  # type: ignore[arg-type]
    assert len(sides[0].middles) == TURNS
    failed = [Timed("decode", [9.0] * TURNS), Timed("step", [8.0])]
    time_in_turns(failed)  # type: ignore[arg-type]
    assert not failed[0].found
