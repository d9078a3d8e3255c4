# SPDX-License-Identifier: Apache-2.0
from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.telemetry.metrics import DURATION_BOUNDS_NS, QUICK_NS, SlowTally

DURATIONS = st.one_of(st.integers(0, 2 * DURATION_BOUNDS_NS[-1]), st.sampled_from(DURATION_BOUNDS_NS))


@given(st.lists(DURATIONS, min_size=1, max_size=20))
def test_durations_counted_together_or_one_by_one_are_in_the_bucket_each_belongs_to(durations):
    expected = [0] * (len(DURATION_BOUNDS_NS) + 1)
    for duration in durations:
        expected[bisect_left(DURATION_BOUNDS_NS, duration)] += 1
    one_by_one, together = SlowTally(), SlowTally()
    for duration in durations:
        if duration > QUICK_NS:
            one_by_one.add(duration)
    together.add_all(durations)
    assert one_by_one.counts(len(durations)) == together.counts(len(durations)) == expected
