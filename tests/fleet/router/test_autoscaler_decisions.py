# SPDX-License-Identifier: Apache-2.0
"""How many replicas a load needs: what always holds, and Knative's windows by example."""

from __future__ import annotations

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from headrace.fleet.autoscaling.autoscaler import (
    CONCURRENCY,
    KNATIVE,
    NO_PANIC,
    RPS,
    UTILISATION,
    AutoscalerSpec,
    LoadMeter,
    PanicState,
    Sample,
    decide_replicas,
)
from headrace.fleet.router.settings import TargetScale

STABLE_SECONDS, PANIC_SECONDS = KNATIVE.stable_seconds, KNATIVE.panic_seconds

_values = st.floats(0, 1e6)
_scales = st.builds(AutoscalerSpec, st.floats(0.01, 1e4), st.integers(1, 1000))
_panics = st.builds(PanicState, st.floats(-1e3, 1e4), st.integers(0, 1000))


@st.composite
def _minutes(draw: st.DrawFn) -> tuple[list[Sample], float]:
    values = draw(st.lists(_values, min_size=1, max_size=90))
    return [Sample(float(time), value) for time, value in enumerate(values)], float(len(values) - 1)


def steady(value: float, seconds: int = 60) -> tuple[list[Sample], float]:
    return [Sample(float(time), value) for time in range(seconds)], float(seconds - 1)


@given(_minutes(), _scales, st.integers(0, 1000), _panics)
def test_always_from_one_to_the_most(
    minute: tuple[list[Sample], float], scale: AutoscalerSpec, ready: int, panic: PanicState
) -> None:
    samples, now = minute
    result = decide_replicas(samples, now, scale, ready, panic)
    assert result is not None and 1 <= result.replicas <= scale.max_replicas
    assert result.panic.min_replicas <= scale.max_replicas
    assert decide_replicas(samples, now, scale, ready, panic) == result


@given(_minutes(), _scales, st.integers(0, 1000), st.integers(0, 1000))
def test_in_panic_mode_no_replica_is_removed(
    minute: tuple[list[Sample], float], scale: AutoscalerSpec, ready: int, least: int
) -> None:
    samples, now = minute
    result = decide_replicas(samples, now, scale, ready, PanicState(now + 1, least))
    assert result is not None and result.replicas >= min(least, scale.max_replicas)


@given(_values, _scales, st.integers(1, 1000))
def test_a_steady_load_gets_what_it_needs(value: float, scale: AutoscalerSpec, ready: int) -> None:
    samples, now = steady(value)
    result = decide_replicas(samples, now, scale, ready)
    assert result is not None
    exact = value / (scale.target * UTILISATION)
    if exact <= scale.max_replicas and exact <= 1000 * ready:
        assert result.replicas >= min(scale.max_replicas, int(exact))
    if exact > ready / 2:
        assert result.replicas <= ceil(exact) + 1
    # At most half are taken away at once.
    assert result.replicas >= min(scale.max_replicas, ready // 2)


@given(st.lists(st.tuples(_values, _values), min_size=1, max_size=90), _scales, st.integers(0, 1000))
def test_more_load_never_means_fewer_replicas(
    pairs: list[tuple[float, float]], scale: AutoscalerSpec, ready: int
) -> None:
    now = float(len(pairs) - 1)
    less = [Sample(float(time), min(pair)) for time, pair in enumerate(pairs)]
    more = [Sample(float(time), max(pair)) for time, pair in enumerate(pairs)]
    few, many = decide_replicas(less, now, scale, ready), decide_replicas(more, now, scale, ready)
    assert few is not None and many is not None and few.replicas <= many.replicas


@given(_minutes(), _scales, st.integers(0, 1000))
def test_what_is_older_than_the_window_counts_for_nothing(
    minute: tuple[list[Sample], float], scale: AutoscalerSpec, ready: int
) -> None:
    samples, now = minute
    old = [Sample(now - STABLE_SECONDS - number, 1e9) for number in range(5)]
    assert decide_replicas([*old, *samples], now, scale, ready) == decide_replicas(samples, now, scale, ready)
    assert decide_replicas(samples, now + STABLE_SECONDS + 1, scale, ready) is None


def test_a_burst_scales_up_immediately_and_is_kept_for_a_minute() -> None:
    scale = TargetScale(CONCURRENCY, 10, 20).spec
    calm = [Sample(float(time), 3.0) for time in range(60)]
    assert decide_replicas(calm, 59, scale, 1) is not None
    burst = [*calm, *(Sample(60.0 + time, 70.0) for time in range(6))]
    result = decide_replicas(burst, 65, scale, 1)
    # The minute says two, the last six seconds say ten.
    assert result is not None and result.replicas == 10
    assert result.panic == PanicState(65 + STABLE_SECONDS, 10)
    over = [*burst, *(Sample(66.0 + time, 0.0) for time in range(130))]
    during = decide_replicas(over, 100, scale, 10, result.panic)
    assert during is not None and during.replicas == 10
    after = decide_replicas(over, 65 + STABLE_SECONDS, scale, 10, during.panic)
    assert after is not None and after.replicas == 5 and after.panic == NO_PANIC


def test_seven_for_a_target_of_ten_are_one_replica() -> None:
    for count, replicas in ((7, 1), (7.1, 2), (14, 2), (70, 10)):
        result = decide_replicas(*steady(count), AutoscalerSpec(10, 100), replicas)
        assert result is not None and result.replicas == replicas


def test_the_meter_reports_concurrency_and_requests_per_second() -> None:
    meter = LoadMeter()
    arrived = 0
    for quarter in range(41):
        meter.add(quarter / 4, 4 if quarter % 2 else 0, arrived)
        arrived += 5
    assert [sample.value for sample in meter.samples(RPS)] == [20.0] * 10
    assert all(abs(sample.value - 2) <= 0.5 for sample in meter.samples(CONCURRENCY))
    assert [sample.time for sample in meter.samples(RPS)] == [float(number) for number in range(1, 11)]
    for second in range(11, 200):
        meter.add(float(second), 0, arrived)
    assert len(meter.samples(RPS)) <= STABLE_SECONDS + 1
    meter.clear()
    assert not meter.samples(RPS) and PANIC_SECONDS < STABLE_SECONDS
