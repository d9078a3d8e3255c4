# SPDX-License-Identifier: Apache-2.0
"""Rate limits in a real Redis, shared by several who count, and what happens when it stops and comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.api.access import redis_rate_limits
from headrace.api.access.rate_limits import Decision, RateLimiter
from headrace.api.access.redis_rate_limits import RedisRateLimiter
from headrace.api.access.settings import RateLimit
from support.redis_servers import RedisProcess, in_loop, redis_process
from support.waiting import eventually_async

pytestmark = pytest.mark.platform


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with redis_process(tmp_path) as process:
        yield process


async def counting(redis: RedisProcess, *limits: RateLimit) -> RedisRateLimiter:
    await (await redis.connect()).aclose()
    rates = RedisRateLimiter(redis.url, RateLimiter(limits))
    rates.start()
    await connected(rates)
    return rates


async def connected(rates: RedisRateLimiter) -> None:
    await eventually_async(lambda: rates.connected)


async def take(rates: RedisRateLimiter, *subjects: bytes) -> Decision:
    verdict: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
    rates.take(subjects, time.monotonic(), verdict.set_result)
    return await asyncio.wait_for(verdict, 30)


@in_loop
async def test_two_who_count_are_one(redis: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_rate_limits, "ANSWER_SECONDS", 30.0)  # a busy machine is no matter of this test
    one, two = [await counting(redis, RateLimit(100, 3600.0)) for _ in range(2)]
    verdicts = await asyncio.gather(*(take(rates, b"a") for _ in range(100) for rates in (one, two)))
    passed = [rule.remaining(debt) for rule, debt in verdicts if debt > 0]
    assert sorted(passed) == list(range(100))
    rule, debt = await take(one, b"a")
    assert 30 < (rule.refusal(debt).retry_after_seconds or 0) <= 36
    assert (await take(two, b"b"))[1] > 0
    client = await redis.connect()
    ends = await client.pttl("headrace:rate:100/3600000/100:a")
    assert 3_500_000 < ends <= 3_600_000  # and is forgotten then
    await client.aclose()
    await one.close()
    await two.close()


@in_loop
async def test_all_limits_or_none(redis: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_rate_limits, "ANSWER_SECONDS", 30.0)
    rates = await counting(redis, RateLimit(10, 3600.0, "address"), RateLimit(2, 3600.0, "key"))
    verdicts = [await take(rates, b"0a", b"1k") for _ in range(20)]
    assert [debt > 0 for _, debt in verdicts] == [True, True] + [False] * 18
    assert {rule.by for rule, _ in verdicts} == {"key"}
    verdicts = [await take(rates, b"0a", b"1%d" % number) for number in range(10)]
    assert [debt > 0 for _, debt in verdicts] == [True] * 8 + [False] * 2
    await rates.close()


@in_loop
async def test_without_redis_each_process_counts_alone(
    redis: RedisProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_rate_limits, "HEALTH_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(redis_rate_limits, "ANSWER_SECONDS", 30.0)
    rates = await counting(redis, RateLimit(3, 3600.0))
    assert [(await take(rates, b"a"))[1] > 0 for _ in range(4)] == [True, True, True, False]
    redis.stop()
    verdicts = [await take(rates, b"a") for _ in range(5)]
    assert [debt > 0 for _, debt in verdicts] == [True, True, True, False, False]
    redis.start()
    await connected(rates)
    # It has forgotten everything, the script too.
    assert [(await take(rates, b"a"))[1] > 0 for _ in range(4)] == [True, True, True, False]
    await rates.close()
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1
