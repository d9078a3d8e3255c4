# SPDX-License-Identifier: Apache-2.0
"""Rate limits in a real Redis, shared by several who count, and what happens when it stops and comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.api.access import redis_rates
from headrace.api.access.rates import Rates, Verdict
from headrace.api.access.redis_rates import RedisRates
from headrace.api.access.settings import RateLimit
from support.redis_servers import RedisProcess, in_loop, redis_process
from support.waiting import eventually_async

pytestmark = pytest.mark.platform


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with redis_process(tmp_path) as process:
        yield process


async def counting(redis: RedisProcess, *limits: RateLimit) -> RedisRates:
    (await redis.connect()).close()
    rates = RedisRates(redis.url, Rates(limits))
    rates.start()
    await connected(rates)
    return rates


async def connected(rates: RedisRates) -> None:
    await eventually_async(lambda: rates._wire is not None and rates._wire.open)


async def take(rates: RedisRates, *subjects: bytes) -> Verdict:
    verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
    rates.take(subjects, time.monotonic(), verdict.set_result)
    return await asyncio.wait_for(verdict, 30)


@in_loop
async def test_two_who_count_are_one(redis: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_rates, "ANSWER_SECONDS", 30.0)  # a busy machine is no matter of this test
    one, two = [await counting(redis, RateLimit(100, 3600.0)) for _ in range(2)]
    verdicts = await asyncio.gather(*(take(rates, b"a") for _ in range(100) for rates in (one, two)))
    passed = [rule.remaining(owes) for rule, owes in verdicts if owes > 0]
    assert sorted(passed) == list(range(100))
    rule, owes = await take(one, b"a")
    assert 30 < (rule.refused(owes).retry_after_seconds or 0) <= 36
    assert (await take(two, b"b"))[1] > 0
    wire = await redis.connect()
    ends = await wire.command("PTTL", "headrace:rate:100/3600000/100:a")
    assert 3_500_000 < ends <= 3_600_000  # and is forgotten then
    wire.close()
    await one.close()
    await two.close()


@in_loop
async def test_all_limits_or_none(redis: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_rates, "ANSWER_SECONDS", 30.0)
    rates = await counting(redis, RateLimit(10, 3600.0, "address"), RateLimit(2, 3600.0, "key"))
    verdicts = [await take(rates, b"0a", b"1k") for _ in range(20)]
    assert [owes > 0 for _, owes in verdicts] == [True, True] + [False] * 18
    assert {rule.by for rule, _ in verdicts} == {"key"}
    verdicts = [await take(rates, b"0a", b"1%d" % number) for number in range(10)]
    assert [owes > 0 for _, owes in verdicts] == [True] * 8 + [False] * 2
    await rates.close()


@in_loop
async def test_while_redis_is_away_each_counts_for_itself(
    redis: RedisProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_rates, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(redis_rates, "ANSWER_SECONDS", 30.0)
    rates = await counting(redis, RateLimit(3, 3600.0))
    assert [(await take(rates, b"a"))[1] > 0 for _ in range(4)] == [True, True, True, False]
    redis.stop()
    verdicts = [await take(rates, b"a") for _ in range(5)]
    assert [owes > 0 for _, owes in verdicts] == [True, True, True, False, False]
    redis.start()
    await connected(rates)
    # It has forgotten everything, the script too.
    assert [(await take(rates, b"a"))[1] > 0 for _ in range(4)] == [True, True, True, False]
    await rates.close()
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1
