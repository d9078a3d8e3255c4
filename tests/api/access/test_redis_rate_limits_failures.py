# SPDX-License-Identifier: Apache-2.0
"""What rate limits in Redis do when Redis is slow, odd or away, against a fake that answers what a test wants.

That a real Redis counts right is in `test_redis_rate_limits`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time

import pytest

from headrace.api.access import redis_rate_limits
from headrace.api.access.rate_limits import Decision, RateLimiter
from headrace.api.access.redis_rate_limits import RedisAddress, RedisRateLimiter
from headrace.api.access.settings import RateLimit
from headrace.core.errors import FailedPrecondition, InvalidArgument
from support.redis_servers import FakeRedis, in_loop
from support.waiting import eventually_async


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a busy machine takes for an answer is no matter of these tests."""
    monkeypatch.setattr(redis_rate_limits, "ANSWER_SECONDS", 30.0)


async def take(rates: RedisRateLimiter, subject: bytes = b"a") -> Decision:
    verdict: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
    rates.take([subject], time.monotonic(), verdict.set_result)
    return await asyncio.wait_for(verdict, 30)


async def connected(rates: RedisRateLimiter) -> None:
    rates.start()
    await eventually_async(lambda: rates.connected)


def limits() -> RateLimiter:
    return RateLimiter([RateLimit(2, 60.0)])


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", RedisAddress("h", 6379)),
        ("redis://h:7000/3", RedisAddress("h", 7000, database=3)),
        ("rediss://:p%40ss@h/0", RedisAddress("h", 6379, password="p@ss", tls=True)),
        ("redis://me:secret@[::1]:1", RedisAddress("::1", 1, "me", "secret")),
        ("unix:///run/redis.sock", RedisAddress(path="/run/redis.sock")),
        ("unix://:secret@/run/redis.sock?db=3", RedisAddress(password="secret", database=3, path="/run/redis.sock")),
    ],
)
def test_addresses(url: str, address: RedisAddress) -> None:
    assert RedisAddress.parse(url) == address
    assert "secret" not in str(address)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:6379",
        "http://h",
        "redis://",
        "redis://h/x",
        "redis://h:99999",
        "unix://",
        "unix:///a?db=x",
        "redis://:secret@/",
    ],
)
def test_text_that_is_not_an_address(url: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        RedisAddress.parse(url)
    assert "secret" not in refused.value.message


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(FailedPrecondition, match=r"pip install 'headrace\[redis\]'"):
        RedisRateLimiter("redis://h", limits())


REPLY = b"*2\r\n:0\r\n:30000000\r\n"


@pytest.mark.parametrize("size", [1, 2, 7, len(REPLY)])
@in_loop
async def test_answers_in_any_pieces(size: int) -> None:
    async with FakeRedis(lambda _words: REPLY, piece_bytes=size) as fake:
        rates = RedisRateLimiter(fake.url, limits())
        await connected(rates)
        assert [(await take(rates))[1] for _ in range(3)] == [30_000_000_000] * 3
        assert rates.connected
        await rates.close()


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b":x\r\n",
        b"$x\r\n",
        b"\r\n",
        b"+OK\r\n",
        b"$-1\r\n",
        b"*-1\r\n",
        b"*1\r\n:0\r\n",
        b"*1\r\n" * 50,
        b"+" + b"x" * 2_000_000,
    ],
)
@in_loop
async def test_an_invalid_redis_reply_falls_back_to_local_counting(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_rate_limits, "HEALTH_CHECK_SECONDS", 3600.0)
    async with FakeRedis(lambda _words: data) as fake:
        rates = RedisRateLimiter(fake.url, limits())
        await connected(rates)
        monkeypatch.setattr(redis_rate_limits, "ANSWER_SECONDS", 0.05)
        assert [(await take(rates))[1] > 0 for _ in range(7)] == [True, True] + [False] * 5
        assert not rates.connected
        await rates.close()


@in_loop
async def test_a_server_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeRedis(lambda _words: b"+OK\r\n") as fake:
        url = fake.url
    rates = RedisRateLimiter(url, limits())
    rates.start()
    await eventually_async(lambda: caplog.records)
    assert not rates.connected
    assert [(await take(rates))[1] > 0 for _ in range(3)] == [True, True, False]
    await rates.close()
    assert "ConnectionRefusedError" in caplog.text


@in_loop
async def test_password_and_database_are_sent_first(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeRedis(lambda _words: b"+OK\r\n") as fake:
        rates = RedisRateLimiter(f"redis://me:secret@127.0.0.1:{fake.port}/4", limits())
        await connected(rates)
        await rates.close()
        assert fake.commands[:3] == [[b"AUTH", b"me", b"secret"], [b"SELECT", b"4"], [b"PING"]]
    async with FakeRedis(lambda _words: b"-WRONGPASS invalid\r\n") as fake:
        rates = RedisRateLimiter(f"redis://:secret@127.0.0.1:{fake.port}", limits())
        rates.start()
        await eventually_async(lambda: caplog.records)
        assert not rates.connected
        await rates.close()
    assert "WRONGPASS invalid" in caplog.text or "invalid" in caplog.text
    assert "secret" not in caplog.text


@in_loop
async def test_a_script_that_redis_does_not_have_is_sent() -> None:
    def answer(words: list[bytes]) -> bytes:
        return b"-NOSCRIPT No matching script\r\n" if words[0] == b"EVALSHA" else b"*2\r\n:0\r\n:30000000\r\n"

    async with FakeRedis(answer) as fake:
        rates = RedisRateLimiter(fake.url, limits())
        await connected(rates)
        rule, debt = await take(rates)
        assert (rule.remaining(debt), debt) == (1, 30_000_000_000)
        assert [words[0] for words in fake.commands] == [b"PING", b"EVALSHA", b"EVAL"]
        _, _, count, key, interval, tolerance = fake.commands[-1]
        assert (count, key, interval, tolerance) == (b"1", b"headrace:rate:2/60000/2:a", b"30000000", b"60000000")
        await rates.close()


@in_loop
async def test_the_reply_of_redis_decides() -> None:
    async with FakeRedis(lambda _words: b"*2\r\n:1\r\n:-1500000\r\n") as fake:
        rates = RedisRateLimiter(fake.url, limits())
        await connected(rates)
        rule, debt = await take(rates, b"x" * 5000)
        assert rule.refusal(debt).retry_after_seconds == 1.5
        assert len(fake.commands[-1][3]) < 200  # what a client chose to be long is hashed
        await rates.close()


@in_loop
async def test_no_request_waits_for_a_redis_that_hangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_rate_limits, "HEALTH_CHECK_SECONDS", 3600.0)  # it is not found again while this looks
    async with FakeRedis(lambda _words: None) as fake:
        rates = RedisRateLimiter(fake.url, limits())
        await connected(rates)
        monkeypatch.setattr(redis_rate_limits, "ANSWER_SECONDS", 0.05)
        verdicts = await asyncio.gather(*(take(rates) for _ in range(4)))
        # Counted here; which two come first depends on whose time runs out first.
        assert sum(debt > 0 for _, debt in verdicts) == 2
        await take(rates)  # the fifth in a row
        assert not rates.connected
        sent = len(fake.commands)
        await take(rates)  # not even asked
        assert len(fake.commands) == sent
        await rates.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "counted on this machine alone" in caplog.text


@pytest.mark.parametrize("answer", [b"", b"-OOM command not allowed\r\n", b"-READONLY You can't write\r\n"])
@in_loop
async def test_a_redis_that_fails_is_replaced_by_counting_here(answer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeRedis(lambda _words: answer) as fake:
        rates = RedisRateLimiter(fake.url, limits())
        await connected(rates)
        assert [(await take(rates))[1] > 0 for _ in range(4)] == [True, True, False, False]
        await rates.close()


@in_loop
async def test_losing_redis_and_its_return_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_rate_limits, "HEALTH_CHECK_SECONDS", 0.01)
    answers = [b""]  # it hangs up once
    async with FakeRedis(lambda _words: answers.pop() if answers else REPLY) as fake:
        rates = RedisRateLimiter(fake.url, limits())
        with caplog.at_level(logging.INFO):
            await connected(rates)
            await take(rates)
            await eventually_async(lambda: len(caplog.records) >= 3)
        await rates.close()
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
