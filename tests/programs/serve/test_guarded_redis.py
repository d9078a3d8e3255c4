# SPDX-License-Identifier: Apache-2.0
"""Guarded servers that share their limits through Redis: a real one, or a fake one that takes its time."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.api.access import redis_rate_limits
from headrace.api.access.settings import AccessSettings, Concurrency, RateLimit, RateLimits
from headrace.core.clock import SystemClock
from headrace.core.telemetry.metrics import Registry
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from headrace.programs.serve.access_guard import Guard, Middleware, open_guard
from support.redis_servers import FakeRedis, redis_process
from support.serving import Serving, serving
from support.waiting import eventually

PATH = "/v2/models/m/infer"


@contextmanager
def guarded(url: str, limit: RateLimit, called: list[Exchange] | None = None) -> Iterator[tuple[Serving, Guard]]:
    settings = AccessSettings(rates=RateLimits((limit,), redis_url=url), concurrency=Concurrency(100))
    guard = open_guard(settings, Registry(SystemClock()))
    assert guard is not None

    def infer(exchange: Exchange) -> None:
        if called is not None:
            called.append(exchange)
        exchange.respond(OK_JSON, exchange.body)

    async def build() -> Site:
        routes = Routes(Middleware(guard).http)
        routes.add("POST", PATH, infer, scope="infer")
        guard.start()
        assert guard._redis is not None
        async with asyncio.timeout(60):
            while not guard._redis.connected:
                await asyncio.sleep(0.01)
        return Site(routes)

    with serving(build) as server:
        yield server, guard
        server.call(guard.close)


def ask(port: int) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", PATH, b'{"whole": true}')
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.getheader("ratelimit-remaining")


@pytest.mark.platform
def test_two_servers_share_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_rate_limits, "ANSWER_SECONDS", 30.0)
    limit = RateLimit(60, 3600.0)
    with (
        redis_process(tmp_path) as redis,
        guarded(redis.url, limit) as (one, one_guard),
        guarded(redis.url, limit) as (two, two_guard),
        ThreadPoolExecutor(8) as threads,
    ):
        answers = list(threads.map(ask, [one.port, two.port] * 60))
        assert sorted(status for status, _, _ in answers) == [200] * 60 + [429] * 60
        passed = [(body, int(left or "")) for status, body, left in answers if status == 200]
        assert {body for body, _ in passed} == {b'{"whole": true}'}
        assert sorted(left for _, left in passed) == list(range(60))
        assert (one_guard.in_flight, two_guard.in_flight) == (0, 0)


class HangingRedis:
    """A fake Redis, in a thread of its own, that never says what it is asked."""

    def __init__(self) -> None:
        self._started, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._started.wait(60)

    async def _serve(self) -> None:
        async with FakeRedis(lambda _words: None) as self.fake:
            self._loop = asyncio.get_running_loop()
            self._started.set()
            await asyncio.to_thread(self._stop.wait)

    @property
    def url(self) -> str:
        return self.fake.url

    def hang_up(self) -> None:
        """Close its connections, so that nobody waits any longer for an answer."""
        for writer in self.fake._writers:
            self._loop.call_soon_threadsafe(writer.close)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def hanging() -> Iterator[HangingRedis]:
    redis = HangingRedis()
    yield redis
    redis.close()


def test_a_hanging_redis_delays_no_request(hanging: HangingRedis) -> None:
    with guarded(hanging.url, RateLimit(2, 3600.0)) as (server, guard):
        assert [ask(server.port)[0] for _ in range(3)] == [200, 200, 429]
        assert guard.in_flight == 0


def test_a_client_that_disconnects_while_redis_is_queried(
    hanging: HangingRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_rate_limits, "ANSWER_SECONDS", 60.0)  # it is gone before that
    called: list[Exchange] = []
    with guarded(hanging.url, RateLimit(100, 3600.0), called) as (server, guard):
        client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        client.sendall(b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}" % PATH.encode())
        eventually(lambda: server.call(lambda: guard.in_flight))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # by a reset
        client.close()
        eventually(lambda: server.connections() == 0)
        hanging.hang_up()
        eventually(lambda: not server.call(lambda: guard.in_flight))
        assert called == []
        monkeypatch.setattr(redis_rate_limits, "ANSWER_SECONDS", 0.05)
        assert ask(server.port)[0] == 200
