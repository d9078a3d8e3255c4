# SPDX-License-Identifier: Apache-2.0
"""Rate limits: whether a request may pass all of them, and what its sender is told of the tightest.

Asked by the guards of `apps`. Counts in a `table`; `redis_rates` counts elsewhere by the same rules. Time and subjects are
passed in. A request that one limit refuses is not counted by the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.api.access.settings import RateBy, RateLimit
from headrace.api.access.table import BucketTable
from headrace.core.errors import InvalidArgument, ResourceExhausted

_NANO = 1_000_000_000
_WHOM = {"key": "this API key", "user": "this user", "address": "this address"}
_MOST_SECONDS = 366 * 86400


class Rule:
    """A limit in nanoseconds: one request each `interval`, up to `tolerance` ahead of time."""

    __slots__ = ("_lines", "by", "capacity", "interval", "requests", "seconds", "tolerance")

    def __init__(self, limit: RateLimit) -> None:
        if limit.requests < 1 or not 0 < limit.seconds <= _MOST_SECONDS or limit.burst < 0:
            raise InvalidArgument("a rate limit is one request or more, in more than 0 seconds and at most 366 days")
        self.by: RateBy = limit.by
        self.requests = limit.requests
        self.seconds = limit.seconds
        self.capacity = limit.burst or limit.requests
        self.interval = max(1, int(limit.seconds * _NANO / limit.requests))
        self.tolerance = self.interval * self.capacity
        self._lines = (
            b"ratelimit-limit: %d\r\nx-ratelimit-limit: %d\r\n"
            b"ratelimit-remaining: %%d\r\nx-ratelimit-remaining: %%d\r\n"
            b"ratelimit-reset: %%d\r\nx-ratelimit-reset: %%d\r\n"
        ) % (self.capacity, self.capacity)

    def remaining(self, owes: int) -> int:
        """How many more could pass now, by what `Rates.take` said."""
        return (self.tolerance - owes) // self.interval if owes > 0 else 0

    def lines(self, owes: int, wall: float) -> bytes:
        """The same for the sender, as lines of a response's head.

        Those of the IETF's draft, whose reset counts seconds, and the older X- ones, whose reset is a time, as GitHub's.
        """
        if owes > 0:
            left = (self.tolerance - owes) // self.interval
            seconds = -(-owes // _NANO)
        else:
            left = 0
            seconds = -((self.interval + owes - self.tolerance) // _NANO)
        return self._lines % (left, left, seconds, wall + seconds + 1)

    def refused(self, owes: int) -> ResourceExhausted:
        """What a request that may not pass is told."""
        wait = -owes / _NANO
        text = f"{_WHOM[self.by]} may send {self.requests} requests in {self.seconds:g} seconds: wait {wait:.3g} s"
        return ResourceExhausted(text, retry_after_seconds=wait)


Verdict = tuple[Rule, int]
"""The rule that refused a request, or the tightest of those it passed; and what the bucket owes, in nanoseconds until it is
full. Below zero: the request may not pass, and would so many nanoseconds later."""


class Rates:
    """All limits of a server, counted in its own memory."""

    def __init__(self, limits: Sequence[RateLimit], table: BucketTable | None = None) -> None:
        self.rules = [Rule(limit) for limit in limits]
        self._table = table or BucketTable()

    def take(self, subjects: Sequence[bytes], now: float) -> Verdict:
        """Count one request, for each limit's subject."""
        moment = int(now * _NANO)
        rules = self.rules
        table = self._table
        rule = rules[0]
        owes = table.charge(subjects[0], moment, rule.interval, rule.tolerance)
        if len(rules) == 1 or owes < 0:
            return rule, owes
        tightest = rule, owes
        for number in range(1, len(rules)):
            rule = rules[number]
            owes = table.charge(subjects[number], moment, rule.interval, rule.tolerance)
            if owes < 0:
                for before in range(number):
                    table.refund(subjects[before], rules[before].interval)
                return rule, owes
            if rule.remaining(owes) < tightest[0].remaining(tightest[1]):
                tightest = rule, owes
        return tightest

    def close(self) -> None:
        """Let go of the table."""
        self._table.close()
