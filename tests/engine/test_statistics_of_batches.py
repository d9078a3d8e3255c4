# SPDX-License-Identifier: Apache-2.0
"""What a batch adds to the statistics is what its requests would add one by one."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.statistics import VersionStatistics

MILLISECOND = 1_000_000
REQUESTS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 50 * MILLISECOND)), min_size=1, max_size=12)


@given(REQUESTS, st.integers(0, 20 * MILLISECOND))
def test_a_batch_counts_as_its_requests_one_by_one(requests, infer_ns):
    together, apart = VersionStatistics(), VersionStatistics()
    now_ns = 10**12
    request = SimpleNamespace(id="a")
    batch = [SimpleNamespace(rows=rows, arrived_ns=now_ns - waited, request=request) for rows, waited in requests]
    sizes, waits = [rows for rows, _ in requests], [waited for _, waited in requests]
    together.computed_together(sizes, waits, 5, infer_ns, 7)
    together.answered_together(batch, now_ns)
    for rows, waited in requests:
        apart.computed_together([rows], [waited], 5, infer_ns, 7)
        apart.answered(rows, None, waited, now_ns - waited, "a")
    assert together.recent == apart.recent
    assert together.excess == pytest.approx(apart.excess)
    for name in ("computed", "settled", "loads"):
        assert getattr(together, name) == getattr(apart, name), name
    for name in ("slow_requests", "slow_queues", "slow_computes"):
        total = len(requests)
        assert getattr(together, name).counts(total) == getattr(apart, name).counts(total), name
    for rows in set(sizes):
        ours, theirs = together.by_rows[rows], apart.by_rows[rows]
        assert {slot: getattr(ours, slot) for slot in ours.__slots__} == {
            slot: getattr(theirs, slot) for slot in theirs.__slots__
        }
