# SPDX-License-Identifier: Apache-2.0
"""Quantiles: the promised error, the promised window, the promised memory."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.core.clock import ManualClock
from headrace.core.telemetry.metrics import LARGEST, RELATIVE_ERROR, SLICES, SMALLEST, Registry, Summary

QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
WINDOW = 60.0


def summary_on(clock):
    return Summary(clock, QUANTILES, WINDOW)


def exact(values):
    ordered = sorted(values)
    return [ordered[math.floor(quantile * (len(ordered) - 1))] for quantile in QUANTILES]


@given(st.lists(st.floats(2 * SMALLEST, LARGEST), min_size=1))
@example([1.0] * 100 + [1000.0])
@example([2 * SMALLEST, LARGEST])
def test_quantiles_are_within_the_promised_error(values):
    summary = summary_on(ManualClock())
    for value in values:
        summary.observe(value)
    assert summary.values() == pytest.approx(exact(values), rel=RELATIVE_ERROR * (1 + 1e-9))


def test_an_empty_window_has_no_quantiles():
    summary = summary_on(ManualClock())
    assert all(map(math.isnan, summary.values()))
    assert (summary.count, summary.sum) == (0, 0)


def test_zero_and_less_count_as_zero():
    summary = summary_on(ManualClock())
    for value in (0, -5, SMALLEST / 2, 100):
        summary.observe(value)
    values = summary.values()
    assert values[:-1] == [0.0] * 4
    assert values[-1] == pytest.approx(100, rel=RELATIVE_ERROR)
    assert summary.sum == pytest.approx(95)


@pytest.mark.parametrize("value", [LARGEST, LARGEST * 100, math.inf])
def test_what_is_too_large_counts_as_the_largest(value):
    summary = summary_on(ManualClock())
    summary.observe(value)
    assert summary.values() == pytest.approx([LARGEST] * len(QUANTILES), rel=RELATIVE_ERROR)


@given(st.lists(st.tuples(st.floats(0, WINDOW), st.floats(1e-3, 1e3)), min_size=1))
def test_the_window_covers_its_length(observations):
    """Newer than five sixths of the window is always in; older than the window never is."""
    clock = ManualClock()
    summary = summary_on(clock)
    times = []
    for wait, value in observations:
        clock.advance(wait)
        summary.observe(value)
        times.append((clock.monotonic(), value))
    certain = [value for time, value in times if clock.monotonic() - time < WINDOW * (SLICES - 1) / SLICES - 1e-6]
    possible = [value for time, value in times if clock.monotonic() - time <= WINDOW + 1e-6]
    smallest, largest = summary.values()[0], summary.values()[-1]
    allowed = 1 + 2 * RELATIVE_ERROR
    assert min(possible) / allowed <= smallest <= min(certain) * allowed
    assert max(certain) / allowed <= largest <= max(possible) * allowed


@pytest.mark.parametrize("wait", [WINDOW, WINDOW * 1.5, WINDOW * 1000])
def test_the_window_forgets_without_new_values(wait):
    clock = ManualClock()
    summary = summary_on(clock)
    summary.observe(5)
    clock.advance(wait)
    assert all(map(math.isnan, summary.values()))


def test_count_and_sum_are_of_all_time():
    clock = ManualClock()
    summary = summary_on(clock)
    summary.observe(5)
    clock.advance(WINDOW * 10)
    summary.observe(7)
    assert (summary.count, summary.sum) == (2, 12)
    assert summary.values() == pytest.approx([7] * len(QUANTILES), rel=RELATIVE_ERROR)


def test_a_value_just_after_a_long_silence_is_kept_for_a_whole_window():
    clock = ManualClock()
    summary = summary_on(clock)
    clock.advance(WINDOW * 100 + 1)
    summary.observe(3)
    clock.advance(WINDOW * (SLICES - 1) / SLICES - 0.001)
    assert not math.isnan(summary.values()[0])


def test_memory_is_bounded_for_any_input():
    clock = ManualClock()
    summary = summary_on(clock)
    for step in range(20_000):
        clock.advance(WINDOW / 5_000)
        summary.observe(10 ** ((step * 7919 % 24_000) / 1000 - 11))
    slices = summary._slices
    assert len(slices) == SLICES
    most = math.log(LARGEST / SMALLEST) / math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)) + 3
    assert 100 < max(map(len, slices)) <= most


@pytest.mark.parametrize("quantiles", [[-0.1], [1.1], [math.nan], [0.5, 0.5]])
def test_bad_quantiles_are_refused(quantiles):
    with pytest.raises(ValueError, match="quantiles .* are not allowed"):
        Registry(ManualClock()).summary("s", "S.", quantiles=quantiles)


@pytest.mark.parametrize("seconds", [0, -1, math.nan])
def test_a_window_must_last(seconds):
    with pytest.raises(ValueError, match="window"):
        Registry(ManualClock()).summary("s", "S.", window_seconds=seconds)
