# SPDX-License-Identifier: Apache-2.0
"""When a backend gets requests and when not: active checks, ejection, budget."""

from __future__ import annotations

from headrace.fleet.router.backend import Backend, Outcome
from headrace.fleet.router.backends import Backends
from headrace.fleet.router.retries import RetryBudget
from headrace.fleet.router.settings import (
    BackendAddress,
    HealthSettings,
    OutlierSettings,
    RetrySettings,
    RouterSettings,
)


def _backends(count: int, **outliers: float) -> Backends:
    addresses = tuple(BackendAddress.parse(f"http://b{n}:80") for n in range(count))
    return Backends(
        RouterSettings(addresses, health=HealthSettings(), outliers=OutlierSettings(**outliers))  # type: ignore[arg-type]
    )


def _fail(backends: Backends, backend: Backend, count: int, now: float, outcome: int = Outcome.FAILED) -> None:
    for _ in range(count):
        backends.begin(backend)
        backends.end(backend, outcome, now)


def test_the_first_check_counts_immediately_and_later_ones_by_thresholds() -> None:
    backends = _backends(2)
    one = backends.all[0]
    backends.checked(one, False, 1.0, "no answer")
    assert one.state == "down" and backends.live == [backends.all[1]]
    backends.checked(one, True, 2.0)
    assert one.state == "down"
    backends.checked(one, False, 3.0, "no answer")
    backends.checked(one, True, 4.0)
    assert one.state == "down"  # not two in a row
    backends.checked(one, True, 5.0)
    assert one.state == "up" and one in backends.live
    for now in (6.0, 7.0):
        backends.checked(one, False, now, "no answer")
    assert one.state == "up"
    backends.checked(one, False, 8.0, "answered 500")
    assert one.state == "down" and one.health.reason == "answered 500"


def test_all_down_is_reported_with_names_and_reasons() -> None:
    backends = _backends(2)
    for backend in backends.all:
        backends.checked(backend, False, 1.0, "cannot be reached: Connection refused")
    assert backends.pick() is None
    error = backends.unavailable()
    assert "http://b0:80 is down (cannot be reached" in error.message and "http://b1:80 is down" in error.message
    assert error.retry_after_seconds and error.retry_after_seconds >= 1


def test_consecutive_failures_eject_and_a_success_starts_the_count_again() -> None:
    backends = _backends(2, consecutive_failures=3, error_rate=0)
    one = backends.all[0]
    _fail(backends, one, 2, 1.0)
    _fail(backends, one, 1, 1.0, Outcome.OK)
    _fail(backends, one, 2, 1.0)
    assert one.state == "up"
    _fail(backends, one, 1, 1.0, Outcome.REFUSED)
    assert one.state == "ejected" and backends.live == [backends.all[1]]
    backends.tick(5.9)
    assert one.state == "ejected"
    backends.tick(6.0)
    assert one.state == "up"


def test_ejections_grow_and_shrink_again() -> None:
    backends = _backends(2, consecutive_failures=1, longest_ejection_seconds=12)
    one = backends.all[0]
    now = 0.0
    for seconds in (5.0, 10.0, 12.0):
        _fail(backends, one, 1, now)
        backends.tick(now + seconds - 0.1)
        assert one.state == "ejected", seconds
        now += seconds
        backends.tick(now)
        assert one.state == "up", seconds
    for _ in range(100):
        now += 1.0
        backends.tick(now)
    assert one.health.ejections == 0


def test_a_high_error_rate_ejects_without_failures_in_a_row() -> None:
    backends = _backends(2, consecutive_failures=0, error_rate=0.5, least_requests=20)
    one = backends.all[0]
    for _ in range(9):
        _fail(backends, one, 1, 1.0)
        _fail(backends, one, 1, 1.0, Outcome.OK)
    assert one.state == "up"  # too few to tell
    _fail(backends, one, 1, 1.0, Outcome.OK)
    _fail(backends, one, 1, 1.0)
    assert one.state == "ejected"


def test_failures_of_an_old_window_are_forgotten() -> None:
    backends = _backends(2, consecutive_failures=0, error_rate=0.5, least_requests=20)
    one = backends.all[0]
    backends.tick(0.0)
    _fail(backends, one, 19, 1.0)
    backends.tick(11.0)
    _fail(backends, one, 10, 12.0)
    assert one.state == "up"


def test_at_most_half_are_ejected() -> None:
    for count, most in ((1, 0), (2, 1), (3, 1), (4, 2), (5, 2)):
        backends = _backends(count, consecutive_failures=2)
        for backend in backends.all:
            _fail(backends, backend, 10, 1.0)
        assert sum(backend.state == "ejected" for backend in backends.all) == most, count


def test_a_client_that_disconnects_does_not_count_against_the_backend() -> None:
    backends = _backends(2, consecutive_failures=1)
    _fail(backends, backends.all[0], 50, 1.0, Outcome.CANCELLED)
    assert backends.all[0].state == "up"
    assert backends.all[0].outstanding == 0 and backends.all[0].stats.cancelled == 50


def test_an_ejected_backend_that_its_checks_find_down_stays_out_after_the_ejection() -> None:
    backends = _backends(2, consecutive_failures=1)
    one = backends.all[0]
    backends.checked(one, True, 0.0)
    _fail(backends, one, 1, 1.0)
    for now in (2.0, 3.0, 4.0):
        backends.checked(one, False, now, "gone")
    backends.tick(100.0)
    assert one.state == "down" and one not in backends.live


def test_the_budget_allows_a_fifth_when_its_reserve_is_used_up() -> None:
    budget = RetryBudget(RetrySettings(budget=0.2, reserve=10))
    assert sum(budget.spend() for _ in range(100)) == 10
    granted = 0
    for _ in range(1000):
        budget.earn()
        granted += budget.spend()
    assert 195 <= granted <= 200
    assert budget.refused == 90 + 1000 - granted
