# SPDX-License-Identifier: Apache-2.0
"""The delay that chooses itself: nothing where waiting does not pay, and never so long that the target is missed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from headrace.engine.scheduling.dynamic_batcher import AutoDelay, BatchRules, FixedDelay, choose_batch
from support.engines import pending_of

MS = 1_000_000
SECOND = 1000 * MS
TARGET_MS = 20.0


def test_a_fixed_delay_learns_nothing() -> None:
    delay = FixedDelay(5 * MS)
    for _ in range(1000):
        delay.batch_finished([SECOND], 1, MS)
    assert delay.nanoseconds == 5 * MS


class Simulation:
    """One instance, made-up times: a computation takes `fixed` and `per_row` nanoseconds."""

    def __init__(self, delay: AutoDelay, gap_ns: int, *, fixed: int, per_row: int, largest: int = 8) -> None:
        self.delay = delay
        self.latencies: list[int] = []
        self.batches: list[int] = []
        self._rules = BatchRules(largest)
        self._arrivals = self._evenly(gap_ns)
        self._next = next(self._arrivals)
        self._fixed, self._per_row = fixed, per_row
        self._queue: deque[int] = deque()
        self.now = 0

    @staticmethod
    def _evenly(gap_ns: int) -> Iterator[int]:
        """Arrivals around every `gap_ns`, early and late by turns."""
        number = 0
        while True:
            number += 1
            yield number * gap_ns + (number * 7919 % 13 - 6) * gap_ns // 20

    def run(self, batches: int) -> None:
        for _ in range(batches):
            self._batch()

    def _batch(self) -> None:
        while True:
            while self._next <= self.now:
                self._queue.append(self._next)
                self._next = next(self._arrivals)
            if not self._queue:
                self.now = self._next
                continue
            waiting = [pending_of(arrived_ns=arrived) for arrived in self._queue]
            choice = choose_batch(waiting, self._rules, self.delay.nanoseconds, self.now)
            if choice.requests:
                break
            self.now = min(self.now + choice.wait_ns, self._next)
        batch = [self._queue.popleft() for _ in range(choice.requests)]
        compute = self._fixed + self._per_row * len(batch)
        self.now += compute
        latencies = [self.now - arrived for arrived in batch]
        self.latencies += latencies
        self.batches.append(len(batch))
        self.delay.batch_finished(latencies, len(batch), compute)
        self.delay.adjust(self.now)

    def p99(self, last: int) -> int:
        ordered = sorted(self.latencies[-last:])
        return ordered[len(ordered) * 99 // 100]


def test_it_begins_without_a_delay() -> None:
    assert AutoDelay(TARGET_MS, 8).nanoseconds == 0


def test_at_a_low_rate_requests_do_not_wait() -> None:
    """A second between two requests: no companion would come within the target."""
    simulation = Simulation(AutoDelay(TARGET_MS, 8), SECOND, fixed=2 * MS, per_row=MS // 10)
    simulation.run(500)
    assert simulation.delay.nanoseconds == 0
    assert set(simulation.batches) == {1}
    assert simulation.delay.rows_per_second == pytest.approx(1, rel=0.1)


def test_at_a_high_rate_batches_grow_and_the_target_is_kept() -> None:
    """A request every 2 ms, 1 ms to compute one: none would queue by itself; waiting makes batches of it."""
    simulation = Simulation(AutoDelay(TARGET_MS, 8), 2 * MS, fixed=MS, per_row=MS // 10)
    simulation.run(2000)
    assert simulation.delay.nanoseconds > 4 * MS
    assert sum(simulation.batches[-200:]) / 200 > 3
    assert simulation.p99(2000) <= TARGET_MS * MS


PER_ROW_US = 10
RATES = [
    (gap_us, fixed_us)
    for gap_us in (300, 700, 1500, 3000, 6000, 10_000, 30_000)
    for fixed_us in (200, 2000, 8000)
    # What full batches can bear, with something to spare.
    if 8 * gap_us > 1.2 * (fixed_us + 8 * PER_ROW_US)
]


@pytest.mark.parametrize(("gap_us", "fixed_us"), RATES)
def test_the_target_is_kept_at_any_rate_the_instance_can_bear(gap_us: int, fixed_us: int) -> None:
    per_row = PER_ROW_US * 1000
    simulation = Simulation(AutoDelay(TARGET_MS, 8), gap_us * 1000, fixed=fixed_us * 1000, per_row=per_row)
    simulation.run(3000)
    unavoidable = 2 * (fixed_us * 1000 + 8 * per_row)
    assert simulation.p99(2000) <= max(TARGET_MS * MS, unavoidable)
    # Longer than it takes to fill the largest batch is never of use.
    assert simulation.delay.nanoseconds <= 8 * gap_us * 1000


def test_the_delay_follows_the_rate_down_again() -> None:
    simulation = Simulation(AutoDelay(TARGET_MS, 8), 2 * MS, fixed=MS, per_row=MS // 10)
    simulation.run(2000)
    assert simulation.delay.nanoseconds > 0
    quiet = Simulation(simulation.delay, SECOND, fixed=MS, per_row=MS // 10)
    # The same delay, later: the clock goes on where it was.
    quiet.now = simulation.now
    quiet.run(2000)
    assert quiet.delay.nanoseconds == 0


def test_over_the_target_the_delay_is_halved() -> None:
    simulation = Simulation(AutoDelay(TARGET_MS, 8), 2 * MS, fixed=MS, per_row=MS // 10)
    simulation.run(2000)
    delay = simulation.delay
    before, now = delay.nanoseconds, simulation.now
    assert before > 0
    seen = [before]
    for _ in range(2000):
        now += 2 * MS
        delay.batch_finished([int(30 * MS)] * 4, 4, MS)
        delay.adjust(now)
        if delay.nanoseconds != seen[-1]:
            seen.append(delay.nanoseconds)
    assert delay.p99_ns > TARGET_MS * MS
    falls = list(zip(seen, seen[1:], strict=False))
    # Once the late ones fill the window it only falls, by half each time.
    assert falls
    assert all(later == earlier // 2 for earlier, later in falls[-5:])
    assert delay.nanoseconds < before / 16


def test_a_target_that_computing_alone_misses_leaves_no_delay() -> None:
    simulation = Simulation(AutoDelay(5.0, 8), 30 * MS, fixed=8 * MS, per_row=0)
    simulation.run(1000)
    assert simulation.delay.nanoseconds == 0


def test_reviews_without_news_change_nothing() -> None:
    delay = AutoDelay(TARGET_MS, 8)
    for now in range(0, SECOND, MS):
        delay.adjust(now)
    assert delay.nanoseconds == 0
