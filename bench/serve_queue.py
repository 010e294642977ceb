"""Requests that arrive over time, at a server whose steps take what was measured: who waits how long, and who writes how fast.

A deterministic replay: arrivals, prompt and answer lengths come from a seed and are the same for every policy. The server
prefills whoever it can admit before it decodes on, as serving engines do; a decoding step takes the time measured for as
many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival: seconds, tokens of the prompt, tokens of the answer."""

    arrivals: np.ndarray
    prompts: np.ndarray
    answers: np.ndarray


@dataclass(frozen=True)
class Served:
    """What a replay gives; ``ttft`` is the time to the first token, ``tpot`` the mean time per further token."""

    tokens_per_s: float
    p99_ttft_ms: float
    median_ttft_ms: float
    tpot_ms: float
    most_rows: int


def workload(
    requests: int, rate: float, *, bursty: bool, mean_prompt: int, mean_answer: int, longest: int, seed: int = 0
) -> Workload:
    """Return seeded requests: Poisson arrivals at ``rate`` a second, or as many in bursts.

    In a bursty trace the gaps follow a gamma distribution of shape 1/9: their deviation is three times their mean. Lengths are
    exponential, at least 16, and prompt and answer together at most ``longest``.
    """
    chance = np.random.default_rng(seed)
    shape = 1 / 9 if bursty else 1.0
    gaps = chance.gamma(shape, 1 / (rate * shape), requests)
    prompts = np.clip(chance.exponential(mean_prompt, requests), 16, longest // 2).astype(int)
    answers = np.clip(chance.exponential(mean_answer, requests), 16, longest - prompts).astype(int)
    return Workload(np.cumsum(gaps) - gaps[0], prompts, answers)


def serve(
    work: Workload,
    capacity: int,
    step_s: Callable[[int], float],
    prefill_s: Callable[[int], float],
    accepted: Sequence[float],
    prefill_tokens: int = 2048,
    seed: int = 1,
) -> Served:
    """Replay ``work`` on a server of ``capacity`` rows.

    Args:
        step_s: seconds of a decoding step with this many rows.
        prefill_s: seconds of a forward over this many prompt tokens.
        accepted: probabilities of writing 1, 2, ... tokens in a step.
        prefill_tokens: most prompt tokens in one forward.
    """
    chance = np.random.default_rng(seed)
    total = len(work.arrivals)
    first, last = np.zeros(total), np.zeros(total)
    left = work.answers.astype(float).copy()
    written = np.arange(1, len(accepted) + 1)
    running = np.zeros(0, dtype=int)
    now, admitted, most_rows = 0.0, 0, 0
    while admitted < total or len(running):
        if not len(running) and admitted < total:
            now = max(now, work.arrivals[admitted])
        joined, tokens = [], 0
        while (
            admitted < total
            and work.arrivals[admitted] <= now
            and len(running) + len(joined) < capacity
            and (not joined or tokens + work.prompts[admitted] <= prefill_tokens)
        ):
            joined.append(admitted)
            tokens += int(work.prompts[admitted])
            admitted += 1
        if joined:
            now += prefill_s(tokens)
            first[joined] = now
            left[joined] -= 1
            running = np.concatenate([running, joined])
            most_rows = max(most_rows, len(running))
            continue
        now += step_s(len(running))
        left[running] -= chance.choice(written, len(running), p=accepted)
        done = left[running] <= 0
        last[running[done]] = now
        running = running[~done]
    waited = (first - work.arrivals) * 1e3
    per_token = (last - first) * 1e3 / np.maximum(work.answers - 1, 1)
    return Served(
        float(work.answers.sum() / now),
        float(np.percentile(waited, 99)),
        float(np.median(waited)),
        float(per_token.mean()),
        most_rows,
    )
