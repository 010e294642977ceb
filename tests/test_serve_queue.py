"""The replay of arrivals behind the capacity figures: what it must give where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from bench.capacity import accepted_chances, serve_no_slower, serve_rows
from bench.capacity_measure import ACCEPTED, POLICIES, SERVED_SHAPES, logit_differences, merged, policy_groups
from bench.serve_queue import Workload, serve, workload

BATCHES = [1, 16, 64]


def together(requests: int, answer: int = 10) -> Workload:
    """Return requests that all arrive at once."""
    return Workload(np.zeros(requests), np.full(requests, 16), np.full(requests, answer))


def test_one_request_takes_its_prompt_and_a_step_for_each_further_token() -> None:
    served = serve(together(1), 1, lambda rows: 0.5, lambda tokens: 2.0, [1.0])
    assert served.p99_ttft_ms == pytest.approx(2000)
    assert served.tpot_ms == pytest.approx(500)
    assert served.tokens_per_s == pytest.approx(10 / (2 + 9 * 0.5))


def test_who_does_not_fit_waits_for_a_row() -> None:
    narrow, wide = (serve(together(8), rows, lambda rows: 0.5, lambda tokens: 0.0, [1.0]) for rows in (4, 8))
    assert (narrow.most_rows, wide.most_rows) == (4, 8)
    assert wide.p99_ttft_ms == 0
    assert narrow.p99_ttft_ms == pytest.approx(9 * 500)
    assert wide.tokens_per_s == pytest.approx(2 * narrow.tokens_per_s)


@pytest.mark.parametrize("widths", list(ACCEPTED))
def test_accepted_tokens_have_the_drafters_mean(widths: str) -> None:
    chances = accepted_chances(widths)
    assert sum(chances) == pytest.approx(1)
    assert sum(chance * count for count, chance in enumerate(chances, 1)) == pytest.approx(ACCEPTED[widths])


def test_as_many_rows_as_are_no_slower() -> None:
    times = {policy: (BATCHES, [0.01, 0.04, 0.16]) for policy in POLICIES}
    work = workload(200, 50.0, bursty=False, mean_prompt=64, mean_answer=64, longest=400)
    limit = serve_rows(times, "reconstruct", 20, "1,1,1", work).tpot_ms
    rows, served = serve_no_slower(times, "reconstruct", 4, 64, "1,1,1", work, limit)
    assert rows >= 20
    assert served.tpot_ms <= limit
    assert serve_rows(times, "reconstruct", rows + 1, "1,1,1", work).tpot_ms > limit


def test_parts_of_a_row_from_several_processes() -> None:
    assert policy_groups(SERVED_SHAPES["35b"], "1,1,1", 1, is_split=False) == [POLICIES]
    assert sorted(sum(policy_groups(SERVED_SHAPES["35b"], "3,3,3", 64, is_split=True), ())) == sorted(POLICIES)
    logits = np.ones((3, 4))
    row = merged({}, {"is_alone": True, "store_all": 1, "logits": {"store_all": logits}, "compile_s": {"store_all": 2}})
    row = merged(row, {"is_alone": False, "reconstruct": 3, "logits": {"reconstruct": 2 * logits}})
    assert (row["store_all"], row["reconstruct"], row["is_alone"]) == (1, 3, False)
    assert row["compile_s"] == {"store_all": 2}
    assert logit_differences(row["logits"]) == {"store_all": 0.5, "reconstruct": 0.0}
