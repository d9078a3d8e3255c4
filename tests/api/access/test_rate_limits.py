# SPDX-License-Identifier: Apache-2.0
"""Rate limits: which of several refuses, and what the sender is told."""

from __future__ import annotations

import pytest

from headrace.api.access.rate_limits import RateLimiter
from headrace.api.access.settings import RateLimit
from headrace.core.errors import InvalidArgument


def rate_limit_fields(lines: bytes) -> dict[str, int]:
    pairs = [line.split(": ") for line in lines.decode().split("\r\n")[:-1]]
    return {name: int(value) for name, value in pairs}


def test_a_burst_passes_and_one_more_per_interval() -> None:
    rates = RateLimiter([RateLimit(3, 60.0)])
    answers = [rates.take([b"a"], 100.0)[1] for _ in range(4)]
    assert [debt > 0 for debt in answers] == [True, True, True, False]
    assert rates.take([b"b"], 100.0)[1] > 0  # others have their own
    assert rates.take([b"a"], 119.0)[1] < 0
    assert rates.take([b"a"], 120.0)[1] > 0
    assert rates.take([b"a"], 120.0)[1] < 0
    assert all(rates.take([b"a"], 500.0)[1] > 0 for _ in range(3))


def test_the_rate_limit_headers_of_a_response() -> None:
    rates = RateLimiter([RateLimit(3, 60.0)])
    rule, debt = rates.take([b"a"], 0.0)
    assert rate_limit_fields(rule.header_lines(debt, 1000.25)) == {
        "ratelimit-limit": 3,
        "ratelimit-remaining": 2,
        "ratelimit-reset": 20,
        "x-ratelimit-limit": 3,
        "x-ratelimit-remaining": 2,
        "x-ratelimit-reset": 1021,
    }
    for _ in range(2):
        rates.take([b"a"], 0.0)
    rule, debt = rates.take([b"a"], 5.5)
    assert debt < 0
    lines = rate_limit_fields(rule.header_lines(debt, 1000.0))
    assert (lines["ratelimit-remaining"], lines["ratelimit-reset"]) == (0, 55)
    error = rule.refusal(debt)
    assert error.retry_after_seconds == pytest.approx(14.5)
    assert error.message == "this address may send 3 requests in 60 seconds: wait 14.5 s"


def test_burst_is_how_many_may_arrive_at_the_same_moment() -> None:
    rates = RateLimiter([RateLimit(60, 60.0, burst=2)])
    assert [rates.take([b"a"], 0.0)[1] > 0 for _ in range(3)] == [True, True, False]
    assert rates.take([b"a"], 1.0)[1] > 0
    rule, debt = rates.take([b"a"], 1.0)
    assert rate_limit_fields(rule.header_lines(debt, 0))["ratelimit-limit"] == 2


def test_all_limits_must_be_passed_and_a_refused_request_costs_nothing() -> None:
    rates = RateLimiter([RateLimit(10, 10.0, "address"), RateLimit(2, 10.0, "key")])
    subjects = [b"0a", b"1k"]
    assert rates.take(subjects, 0.0)[0].by == "key"  # the tightest is told
    assert rates.take(subjects, 0.0)[1] > 0
    for _ in range(20):
        rule, debt = rates.take(subjects, 0.0)
        assert (rule.by, debt < 0) == ("key", True)
    # The twenty were not counted for the address: eight are left.
    passed = [rates.take([b"0a", b"1%d" % number], 0.0)[1] > 0 for number in range(10)]
    assert passed == [True] * 8 + [False] * 2


@pytest.mark.parametrize(
    "limit", [RateLimit(0), RateLimit(-1), RateLimit(1, 0.0), RateLimit(1, 1e12), RateLimit(1, burst=-1)]
)
def test_a_limit_that_makes_no_sense(limit: RateLimit) -> None:
    with pytest.raises(InvalidArgument, match="a rate limit is"):
        RateLimiter([limit])
