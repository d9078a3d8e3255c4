# SPDX-License-Identifier: Apache-2.0
"""The client of Redis and what rate limits do when Redis is slow, odd or away, against a fake that says what a test wants.

That a real Redis counts right is in `test_redis_rates`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from headrace.api.access import redis_rates
from headrace.api.access.rates import Rates, Verdict
from headrace.api.access.redis_rates import RedisRates
from headrace.api.access.redis_wire import RedisAddress, RedisError, RedisWire, ReplyReader
from headrace.api.access.settings import RateLimit
from headrace.core.errors import InvalidArgument, Unavailable
from support.redis_servers import FakeRedis, in_loop
from support.waiting import eventually_async


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a busy machine takes for an answer is no matter of these tests."""
    monkeypatch.setattr(redis_rates, "ANSWER_SECONDS", 30.0)


async def take(rates: RedisRates, subject: bytes = b"a") -> Verdict:
    verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
    rates.take([subject], time.monotonic(), verdict.set_result)
    return await asyncio.wait_for(verdict, 30)


async def connected(rates: RedisRates) -> None:
    rates.start()
    await eventually_async(lambda: rates._wire)


def limits() -> Rates:
    return Rates([RateLimit(2, 60.0)])


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
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        RedisAddress.parse(url)
    assert "secret" not in refused.value.message


REPLIES = b"+OK\r\n:-7\r\n$5\r\na\r\nbc\r\n$0\r\n\r\n$-1\r\n*-1\r\n*2\r\n:1\r\n*1\r\n$1\r\nx\r\n-ERR no\r\n"


@pytest.mark.parametrize("size", [1, 2, 7, len(REPLIES)])
def test_answers_in_any_pieces(size: int) -> None:
    reader = ReplyReader()
    found: list[Any] = []
    for start in range(0, len(REPLIES), size):
        found += reader.feed(REPLIES[start : start + size])
    *plain, error = found
    assert plain == [b"OK", -7, b"a\r\nbc", b"", None, None, [1, [b"x"]]]
    assert isinstance(error, RedisError)
    assert error.message == "ERR no"


@pytest.mark.parametrize(
    "data", [b"HTTP/1.1 400\r\n", b":x\r\n", b"$x\r\n", b"\r\n", b"*1\r\n" * 50, b"+" + b"x" * 2_000_000]
)
def test_what_is_no_answer(data: bytes) -> None:
    with pytest.raises(ValueError, match="."):
        ReplyReader().feed(data)


@in_loop
async def test_a_server_that_is_not_redis_or_is_not_there() -> None:
    async with FakeRedis(lambda _words: b"HTTP/1.1 400 Bad Request\r\n") as fake:
        wire = await RedisWire.connect(RedisAddress.parse(fake.url))
        with pytest.raises(Unavailable, match="closed"):
            await wire.command("GET", "a")
        assert not wire.open
        with pytest.raises(Unavailable, match="closed"):
            await wire.command("GET", "a")
        address = RedisAddress.parse(fake.url)
    with pytest.raises(Unavailable, match="does not answer: ConnectionRefusedError"):
        await RedisWire.connect(address)


@in_loop
async def test_password_and_database_are_sent_first() -> None:
    async with FakeRedis(lambda _words: b"+OK\r\n") as fake:
        wire = await RedisWire.connect(RedisAddress.parse(f"redis://me:secret@127.0.0.1:{fake.port}/4"))
        wire.close()
        assert fake.commands[:3] == [[b"AUTH", b"me", b"secret"], [b"SELECT", b"4"], [b"PING"]]
    async with FakeRedis(lambda _words: b"-WRONGPASS invalid\r\n") as fake:
        with pytest.raises(Unavailable, match="WRONGPASS invalid") as refused:
            await RedisWire.connect(RedisAddress.parse(f"redis://:secret@127.0.0.1:{fake.port}"))
        assert "secret" not in refused.value.message


@in_loop
async def test_a_script_that_redis_does_not_know_is_sent() -> None:
    def answer(words: list[bytes]) -> bytes:
        return b"-NOSCRIPT No matching script\r\n" if words[0] == b"EVALSHA" else b"*2\r\n:0\r\n:30000000\r\n"

    async with FakeRedis(answer) as fake:
        rates = RedisRates(fake.url, limits())
        await connected(rates)
        rule, owes = await take(rates)
        assert (rule.remaining(owes), owes) == (1, 30_000_000_000)
        assert [words[0] for words in fake.commands] == [b"PING", b"EVALSHA", b"EVAL"]
        _, _, count, key, interval, tolerance = fake.commands[-1]
        assert (count, key, interval, tolerance) == (b"1", b"headrace:rate:2/60000/2:a", b"30000000", b"60000000")
        await rates.close()


@in_loop
async def test_what_redis_says_is_what_counts() -> None:
    async with FakeRedis(lambda _words: b"*2\r\n:1\r\n:-1500000\r\n") as fake:
        rates = RedisRates(fake.url, limits())
        await connected(rates)
        rule, owes = await take(rates, b"x" * 5000)
        assert rule.refused(owes).retry_after_seconds == 1.5
        assert len(fake.commands[-1][3]) < 200  # what a client chose to be long is hashed
        await rates.close()


@in_loop
async def test_no_request_waits_for_a_redis_that_hangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_rates, "AGAIN_SECONDS", 3600.0)  # it is not found again while this looks
    async with FakeRedis(lambda _words: None) as fake:
        rates = RedisRates(fake.url, limits())
        await connected(rates)
        monkeypatch.setattr(redis_rates, "ANSWER_SECONDS", 0.05)
        verdicts = await asyncio.gather(*(take(rates) for _ in range(4)))
        assert [owes > 0 for _, owes in verdicts] == [True, True, False, False]  # counted here
        await take(rates)  # the fifth in a row
        assert rates._wire is None
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
        rates = RedisRates(fake.url, limits())
        await connected(rates)
        assert [(await take(rates))[1] > 0 for _ in range(4)] == [True, True, False, False]
        await rates.close()


@in_loop
async def test_it_is_told_once_that_redis_is_away_and_that_it_is_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_rates, "AGAIN_SECONDS", 0.01)
    async with FakeRedis(lambda _words: b"*2\r\n:0\r\n:30000000\r\n") as fake:
        url = fake.url
        rates = RedisRates(url, limits())
        with caplog.at_level(logging.INFO):
            await connected(rates)
            assert rates._wire is not None
            rates._wire.close()
            await eventually_async(lambda: len(caplog.records) >= 3)
        await rates.close()
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
