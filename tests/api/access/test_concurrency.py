# SPDX-License-Identifier: Apache-2.0
"""How many may be in flight, and who would wait too long."""

from __future__ import annotations

import pytest

from headrace.api.access.concurrency import DeadlineUnreachable, FairShareExceeded, InFlight, InFlightLimitReached
from headrace.core.clock import ManualClock
from headrace.core.errors import InvalidArgument


def run_loaded(flow: InFlight, clock: ManualClock, crowd: int, each_seconds: float, windows: int = 8) -> None:
    """Keep `crowd` requests in flight, of which one is done each `each_seconds`, for so many tenths of a second."""
    while flow.count < crowd:
        flow.enter(clock.monotonic(), None)
    for _ in range(int(windows * 0.1 / each_seconds)):
        clock.advance(each_seconds)
        flow.leave()
        flow.enter(clock.monotonic(), None)


def test_the_limit() -> None:
    flow = InFlight(2, ManualClock())
    flow.enter(0.0, None)
    flow.enter(0.0, None)
    with pytest.raises(InFlightLimitReached, match="2 requests are in flight") as refused:
        flow.enter(0.0, None)
    assert refused.value.retry_after_seconds == 1.0  # nothing is known of its speed
    assert flow.count == 2
    flow.leave()
    flow.enter(0.0, None)
    flow.undo()
    flow.leave()
    assert flow.count == 0


def test_a_refusal_has_a_retry_time() -> None:
    clock = ManualClock(5.0)
    flow = InFlight(50, clock)
    run_loaded(flow, clock, 49, 0.01)
    flow.enter(clock.monotonic(), None)
    assert flow.rate == pytest.approx(100, rel=0.05)
    with pytest.raises(InFlightLimitReached) as refused:
        flow.enter(clock.monotonic(), None)
    assert refused.value.retry_after_seconds == pytest.approx(0.5, rel=0.05)


def test_a_wait_longer_than_the_timeout_is_refused_immediately() -> None:
    clock = ManualClock(5.0)
    flow = InFlight(0, clock)
    run_loaded(flow, clock, 40, 0.01)
    now = clock.monotonic()
    with pytest.raises(DeadlineUnreachable, match=r"40 requests are queued, which takes 0\.4.* s; this one has 0\.3 s"):
        flow.enter(now, 0.3)
    flow.enter(now, 0.5)
    flow.enter(now, None)
    assert flow.count == 42


def test_a_rate_measured_with_few_requests_is_not_extrapolated() -> None:
    clock = ManualClock(5.0)
    flow = InFlight(0, clock)
    run_loaded(flow, clock, 2, 0.01)  # 100 in a second, but perhaps a batch of 64 takes no longer
    for _ in range(60):
        # By that speed the later ones would wait 0.6 s.
        if flow.count > 4:
            flow.enter(clock.monotonic(), 0.03)
        else:
            flow.enter(clock.monotonic(), None)
    assert flow.count == 62


def test_batches_are_counted_whole() -> None:
    clock = ManualClock(5.0)
    flow = InFlight(0, clock)
    for _ in range(64):
        flow.enter(clock.monotonic(), None)
    for _ in range(20):
        clock.advance(0.2)
        for _ in range(32):
            flow.leave()
        for _ in range(32):
            flow.enter(clock.monotonic(), None)
    assert flow.rate == pytest.approx(160, rel=0.01)


def test_idle_time_does_not_lower_the_measured_rate() -> None:
    clock = ManualClock(5.0)
    flow = InFlight(0, clock)
    for _ in range(100):
        clock.advance(60.0)
        flow.enter(clock.monotonic(), 1.0)
        flow.enter(clock.monotonic(), 1.0)
        clock.advance(0.01)
        flow.leave()
        flow.leave()
    assert flow.rate == pytest.approx(200, rel=0.2)


def test_a_limit_that_makes_no_sense() -> None:
    with pytest.raises(InvalidArgument, match="must be 1 or more"):
        InFlight(-1)


def test_a_single_subject_may_use_the_whole_capacity() -> None:
    flow = InFlight(8, ManualClock())
    for _ in range(8):
        flow.share("alone", 0.0).enter(0.0, None)
    with pytest.raises(InFlightLimitReached):
        flow.share("alone", 0.0).enter(0.0, None)


def test_the_last_quarter_is_for_those_below_their_share() -> None:
    flow = InFlight(8, ManualClock())
    noisy, quiet = flow.share("noisy", 0.0), flow.share("quiet", 0.0)
    for _ in range(6):
        noisy.enter(0.0, None)
    with pytest.raises(
        FairShareExceeded, match="6 requests of this API key are in flight; with 2 keys in use, 4 are its share"
    ):
        noisy.enter(0.0, None)
    quiet.enter(0.0, None)
    quiet.enter(0.0, None)
    with pytest.raises(InFlightLimitReached):
        quiet.enter(0.0, None)
    # What is over makes room for whoever has less, and not for the other.
    noisy.leave()
    with pytest.raises(FairShareExceeded):
        noisy.enter(0.0, None)
    quiet.enter(0.0, None)
    assert (noisy.count, quiet.count, flow.count) == (5, 3, 8)
    quiet.undo()
    assert (quiet.count, flow.count) == (2, 7)


def test_shares_are_not_enforced_while_there_is_capacity() -> None:
    flow = InFlight(100, ManualClock())
    for number in range(50):
        flow.share(f"key {number}", 0.0)
    for _ in range(75):
        flow.share("key 0", 0.0).enter(0.0, None)
    with pytest.raises(FairShareExceeded):
        flow.share("key 0", 0.0).enter(0.0, None)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_small_limits_leave_a_place_too(limit: int) -> None:
    flow = InFlight(limit, ManualClock())
    noisy, quiet = flow.share("noisy", 0.0), flow.share("quiet", 0.0)
    quiet.enter(0.0, None)
    quiet.leave()
    for _ in range(max(1, limit - 1)):
        noisy.enter(0.0, None)
    with pytest.raises((InFlightLimitReached, FairShareExceeded)):
        noisy.enter(0.0, None)
    if limit > 1:
        quiet.enter(0.0, None)


def test_a_subject_idle_for_a_minute_loses_its_share() -> None:
    flow = InFlight(4, ManualClock())
    flow.share("quiet", 0.0)
    for now in (0.0, 30.0, 59.0):
        noisy = flow.share("noisy", now)
        noisy.enter(now, None)
    with pytest.raises(FairShareExceeded):
        noisy.enter(59.0, None)
    flow.share("noisy", 61.0).enter(61.0, None)
    assert flow.count == 4
    # One who still waits for an answer is there, however long ago it asked.
    flow.share("slow", 62.0)
    noisy.leave()
    flow.share("slow", 63.0).enter(63.0, None)
    flow.share("noisy", 163.0)
    noisy.leave()
    with pytest.raises(FairShareExceeded):
        flow.share("noisy", 163.0).enter(163.0, None)


def test_those_that_would_be_late_are_shared_out_as_well() -> None:
    clock = ManualClock(5.0)
    flow = InFlight(0, clock)
    run_loaded(flow, clock, 40, 0.01)
    now = clock.monotonic()
    noisy, quiet = flow.share("noisy", now), flow.share("quiet", now)
    noisy.count = 40  # those that run
    with pytest.raises(FairShareExceeded):
        noisy.enter(now, 0.5)
    quiet.enter(now, 0.5)
    noisy.enter(now, None)  # nothing bounds what has no time-out
