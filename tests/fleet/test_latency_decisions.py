# SPDX-License-Identifier: Apache-2.0
"""How many replicas keep latency targets: bursts, ramps, quiet, evidence, and targets that no replica keeps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.fleet.autoscaling.latency_counts import (
    LATENCY_BOUNDS_SECONDS,
    LatencyCounts,
    add_counts,
    parse_counts,
)
from headrace.fleet.autoscaling.latency_target import (
    Evidence,
    LatencyDecision,
    LatencySample,
    LatencySpec,
    decide_for_latency,
)

SPEC = LatencySpec(20, 1, first_seconds=1.0, next_seconds=0.05)
FIRST = LatencySpec(20, 1, first_seconds=1.0)


def counted(seconds: float, count: int) -> LatencyCounts:
    counts = [0] * (len(LATENCY_BOUNDS_SECONDS) + 1)
    counts[bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] = count
    return LatencyCounts(tuple(counts), seconds * count)


def seconds_of(
    rates: Sequence[float],
    first: float = 0.2,
    ready: int = 1,
    following: float = 0.02,
    end: float = 1000.0,
    answered: float = 1e6,
) -> list[LatencySample]:
    """Samples of two seconds with these arrivals per second, the last one now. answered: most first tokens per second."""
    samples = []
    for age, rate in enumerate(reversed(rates)):
        arrivals = round(2 * rate)
        tokens = counted(first, min(arrivals, round(2 * answered)))
        samples.append(
            LatencySample(end - 2 * age, 2.0, ready, arrivals, 2 * rate, tokens, counted(following, 2 * arrivals))
        )
    return samples[::-1]


def decided(
    samples: Sequence[LatencySample],
    replicas: int = 1,
    spec: LatencySpec = FIRST,
    evidence: Evidence = Evidence(),  # noqa: B008  frozen
    start_seconds: float = 30.0,
) -> LatencyDecision:
    decision = decide_for_latency(samples, 1000.0, spec, replicas, start_seconds, evidence)
    assert decision is not None
    return decision


# Percentiles


@given(st.lists(st.floats(0.002, 130), min_size=1, max_size=200), st.sampled_from([50, 90, 95, 99]))
def test_a_percentile_is_exact_to_its_bucket(values: list[float], percent: int) -> None:
    counts = add_counts(counted(value, 1) for value in values)
    exact = sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]
    assert exact / 1.3 <= counts.percentile(percent) <= exact * 1.3


def test_counts_since_an_earlier_reading_and_after_a_restart() -> None:
    before, after = counted(0.1, 5), add_counts([counted(0.1, 5), counted(0.5, 2)])
    assert after.since(before).total == 2
    assert counted(0.1, 3).since(after) == counted(0.1, 3)
    assert after.since(LatencyCounts()) == after


def test_latencies_that_are_longer_than_the_replicas_exist_are_left_out() -> None:
    both = add_counts([counted(0.1, 5), counted(40.0, 2)])
    assert both.up_to(10.0).total == 5
    assert both.up_to(inf) == both


@pytest.mark.parametrize("wrong", [None, [1, 2], ["1"] * 55, [-1] * 55])
def test_counts_of_another_version_are_none(wrong: object) -> None:
    assert parse_counts(wrong, 1.0) == LatencyCounts()


# Up


def test_nothing_is_decided_without_samples() -> None:
    assert decide_for_latency([], 1000.0, FIRST, 1, 30.0, Evidence()) is None


def test_a_steady_load_within_the_targets_changes_nothing() -> None:
    decision = decided(seconds_of([2.0] * 60))
    assert decision.replicas == 1
    assert decision.evidence.proven == pytest.approx(2.0)


def test_a_burst_is_met_at_once_and_the_reason_has_its_numbers() -> None:
    decision = decided([*seconds_of([2.0] * 60, end=998.0), *seconds_of([20.0], first=0.9, answered=5)])
    assert 4 <= decision.replicas <= 12
    assert decision.reason.startswith("first token p95 ")
    assert "20 requests/s expected in 30 s, " in decision.reason
    assert decision.evidence.raised_at == 1000.0


def test_chance_is_no_burst() -> None:
    assert decided([*seconds_of([2.0] * 60, end=998.0), *seconds_of([4.5])]).replicas == 1


def test_a_ramp_is_met_before_it_is_there() -> None:
    ramp = [5 + 0.2 * second for second in range(0, 120, 2)]
    soon, late = (decided(seconds_of(ramp, ready=5), 5, start_seconds=start) for start in (5.0, 60.0))
    assert late.replicas > soon.replicas
    flat = decided(seconds_of([ramp[-1]] * 60, ready=5), 5, start_seconds=60.0)
    assert late.replicas > flat.replicas


def test_a_step_is_no_ramp() -> None:
    """Whatever its age, what is expected is the load after it."""
    for age in range(1, 30):
        decision = decided(seconds_of([2.0] * (60 - age) + [20.0] * age, ready=20), 20, start_seconds=60.0)
        expected = float(decision.reason.partition("; ")[2].split()[0])
        assert (20.0 if age > 2 else 8.0) <= expected <= 20.0


def test_the_bounds_hold() -> None:
    burst = [*seconds_of([2.0] * 60, end=998.0), *seconds_of([100.0], answered=5)]
    limited = decided(burst, spec=LatencySpec(4, 1, first_seconds=1.0))
    assert limited.replicas == 4
    assert limited.reason.endswith("; maxReplicas is 4")
    assert not limited.limited
    late = seconds_of([2.0] * 30, ready=4, end=940.0) + seconds_of([100.0] * 30, first=3.0, ready=4)
    stays = decided(late, 4, LatencySpec(4, 1, first_seconds=1.0))
    assert (stays.replicas, stays.limited) == (4, f"{stays.reason}; maxReplicas is 4")
    assert decided(seconds_of([1.0] * 60), 1, LatencySpec(9, 3, first_seconds=1.0)).replicas == 3
    assert decided(seconds_of([1.0] * 60), 9, LatencySpec(4, 1, first_seconds=1.0)).replicas == 4


# Evidence


def test_a_load_that_missed_a_target_is_spread_over_more_replicas() -> None:
    decision = decided(seconds_of([2.0] * 60, first=0.2)[:30] + seconds_of([4.0] * 15, first=2.0), 1)
    assert decision.evidence.refuted == pytest.approx(4.0)
    assert decision.replicas == 2
    assert "is above 1 s" in decision.reason


def test_what_missed_a_target_before_the_replicas_were_ready_says_nothing() -> None:
    before = seconds_of([4.0] * 40, end=970.0)
    backlog = [
        LatencySample(s.time, 2.0, 4, s.arrivals, 8.0, add_counts([counted(40.0, 9), counted(0.2, s.arrivals)]), s.next)
        for s in seconds_of([4.0] * 15, ready=4)
    ]
    decision = decided([*before, *backlog], 4)
    assert decision.evidence.refuted == inf
    assert decision.replicas == 4


def test_a_refutation_is_forgotten_in_time() -> None:
    old = Evidence(proven=1.0, refuted=2.0, refuted_at=300.0)
    assert decided(seconds_of([1.0] * 60), evidence=old).evidence.refuted == inf
    new = Evidence(proven=1.0, refuted=2.0, refuted_at=900.0)
    assert decided(seconds_of([1.0] * 60), evidence=new).evidence.refuted == 2.0


def test_no_number_of_replicas_keeps_a_target_that_an_idle_one_misses() -> None:
    slow = decided(seconds_of([1.0] * 60, first=1.5, ready=4), 4)
    assert slow.replicas == 4
    assert "more replicas do not help" in slow.limited
    samples = [
        sample
        for number, rate in enumerate((1.0, 3.0) * 30)
        for sample in seconds_of([rate], following=0.08 + 0.001 * rate, end=882.0 + 2 * number)
    ]
    tokens = decided(samples, 6, SPEC)
    assert tokens.replicas == 6
    assert "ms per token, the target is 50 ms: more replicas do not help" in tokens.reason


def test_a_service_that_was_never_quiet_is_scaled_up() -> None:
    """Of five requests a second, two get their first token, after waiting for long."""
    late = [
        LatencySample(940.0 + 2 * number, 2.0, 1, 10, 8.0, counted(0.5 + number, 4), counted(0.02, 8))
        for number in range(31)
    ]
    decision = decided(late)
    assert 3 <= decision.replicas <= 9
    assert not decision.limited


# Tokens


def test_the_time_per_token_grows_with_the_streams() -> None:
    """20 ms, and 1 ms more for each stream: 50 ms are 30 streams, of which each request has two for a second."""
    samples = [
        sample
        for number, rate in enumerate((2.0, 4.0, 6.0, 8.0) * 15)
        for sample in seconds_of([rate], following=0.02 + 0.001 * 2 * rate, end=882.0 + 2 * number)
    ]
    spec = LatencySpec(20, 1, next_seconds=0.05)
    assert decided(samples, 1, spec).replicas == 1
    burst = decided([*samples, *seconds_of([60.0], following=0.14)], 1, spec)
    assert 4 <= burst.replicas <= 9


# Down


def quiet(rates: Sequence[float], replicas: int, **more: float) -> LatencyDecision:
    evidence = Evidence(proven=2.0, **more)
    return decided(seconds_of(rates, ready=replicas), replicas, evidence=evidence)


def test_replicas_are_removed_one_at_a_time_after_a_window() -> None:
    assert quiet([1.0] * 60, 5).replicas == 4
    assert quiet([1.0] * 60, 5, raised_at=950.0).replicas == 5
    assert quiet([1.0] * 60, 5, lowered_at=990.0).replicas == 5
    assert quiet([1.0] * 10, 5).replicas == 5, "the window is not full"


def test_the_highest_load_of_the_window_decides() -> None:
    samples = seconds_of([9.0] * 15, first=0.6, ready=5, end=970.0) + seconds_of([1.0] * 15, ready=5)
    assert decided(samples, 5, evidence=Evidence(proven=2.0)).replicas == 5
    assert quiet([0.0] * 60, 2).replicas == 1


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=60),
    st.floats(0.001, 100),
    st.integers(1, 30),
    st.integers(0, 5),
    st.integers(1, 30),
)
def test_a_decision_is_within_the_bounds_and_removes_one(
    rates: list[float], first: float, replicas: int, least: int, most: int
) -> None:
    spec = LatencySpec(most, least, first_seconds=1.0, next_seconds=0.05)
    decision = decided(seconds_of(rates, first=first, ready=replicas), replicas, spec)
    lowest, highest = max(1, least), max(1, least, most)
    assert lowest <= decision.replicas <= highest
    if replicas <= highest:
        assert decision.replicas >= replicas - 1
