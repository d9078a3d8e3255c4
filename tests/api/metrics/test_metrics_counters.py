# SPDX-License-Identifier: Apache-2.0
"""What was told is not taken back: versions that are loaded anew, and versions that go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from headrace.api.metrics.collector import KEPT_SECONDS, VersionCounters
from headrace.core.clock import ManualClock
from headrace.engine.statistics import VersionStatistics
from support.engines import config_of


class FakeVersion:
    def __init__(self, name: str = "m", version: int = 1, **config: Any) -> None:
        self.name = name
        self.version = version
        self.version_text = str(version)
        self.config = config_of(name, **config)
        self.caches_responses = self.config.response_cache
        self.statistics = VersionStatistics()

    def answers(self, count: int) -> FakeVersion:
        for _ in range(count):
            self.statistics.answered_at_once(1, 500_000, 1)
        return self


def success_counts(ledger: VersionCounters, *versions: Any) -> dict[tuple[str, int], Any]:
    """Successes by version."""
    return {(account.name, account.version): account.row()[0] for account, _ in ledger.update(versions)}


def test_a_version_that_is_loaded_again_keeps_its_counters() -> None:
    ledger = VersionCounters(ManualClock())
    first = FakeVersion().answers(3)
    assert success_counts(ledger, first) == {("m", 1): 3}
    second = FakeVersion().answers(2)
    assert success_counts(ledger, second) == {("m", 1): 5}
    third = FakeVersion().answers(1)
    assert success_counts(ledger, third) == {("m", 1): 6}
    third.answers(1)
    assert success_counts(ledger, third) == {("m", 1): 7}


def test_a_copy_that_retires_counts_until_it_is_done() -> None:
    ledger = VersionCounters(ManualClock())
    first = FakeVersion().answers(3)
    first.statistics.received += 1
    success_counts(ledger, first)
    second = FakeVersion()
    assert success_counts(ledger, second) == {("m", 1): 3}
    assert success_counts(ledger, second) == {("m", 1): 3}
    first.statistics.answered(1, None, 1000)
    assert success_counts(ledger, second) == {("m", 1): 4}
    assert success_counts(ledger, second.answers(1)) == {("m", 1): 5}


def test_counters_of_a_removed_version_are_kept_for_a_while() -> None:
    clock = ManualClock()
    ledger = VersionCounters(clock)
    one, two = FakeVersion(version=1).answers(1), FakeVersion(version=2)
    one.statistics.received += 1
    success_counts(ledger, one, two)
    one.statistics.answered(1, None, 1000)
    clock.advance(1000)
    assert success_counts(ledger, two) == {("m", 2): 0, ("m", 1): 2}  # its last numbers, however late the scrape
    assert [version for _, version in ledger.update([two])] == [two, None]
    clock.advance(KEPT_SECONDS)
    assert success_counts(ledger, two) == {("m", 2): 0, ("m", 1): 2}
    clock.advance(1)
    assert success_counts(ledger, two) == {("m", 2): 0}


def test_counters_continue_after_a_quick_reload_and_restart_after_a_late_one() -> None:
    clock = ManualClock()
    ledger = VersionCounters(clock)
    success_counts(ledger, FakeVersion().answers(3))
    success_counts(ledger)
    clock.advance(KEPT_SECONDS - 1)
    assert success_counts(ledger, FakeVersion().answers(1)) == {("m", 1): 4}
    success_counts(ledger)
    clock.advance(KEPT_SECONDS + 1)
    assert success_counts(ledger) == {}
    assert success_counts(ledger, FakeVersion().answers(1)) == {("m", 1): 1}


def test_the_cache_of_an_older_copy_still_counts() -> None:
    ledger = VersionCounters(ManualClock())
    first = FakeVersion(response_cache=True)
    first.statistics.of_rows(1).hit = 2
    success_counts(ledger, first)
    ((account, _),) = ledger.update([FakeVersion()])
    assert 2 in account.row()


def test_no_version_is_kept_in_memory() -> None:
    ledger = VersionCounters(ManualClock())
    version = FakeVersion()
    success_counts(ledger, version)
    gone = weakref.ref(version)
    del version
    gc.collect()
    assert gone() is None
