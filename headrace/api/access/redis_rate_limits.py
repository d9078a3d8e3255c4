# SPDX-License-Identifier: Apache-2.0
"""Rate limits shared by several machines: a Lua script in Redis counts each request against all limits at once.

Used where the settings have a `redis_url`; needs the package `redis` (the extra `[redis]`). Redis supplies the clock,
so the machines need not agree on the time. While Redis is unavailable or slow, each machine counts by itself
(`rate_limits`): a request waits at most `ANSWER_SECONDS` for Redis, and not at all once Redis is known to be unavailable.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from headrace.api.access.rate_limits import Decision, RateLimiter, RateRule
from headrace.core.errors import InvalidArgument
from headrace.core.extras import MissingExtra

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("headrace.guard")

ANSWER_SECONDS = 0.05
HEALTH_CHECK_SECONDS = 1.0
"""Between two health checks of Redis."""
_PING_SECONDS = 2.0
_SLOW_ANSWERS = 5
"""Redis counts as unavailable after this many time-outs in a row."""
_CONNECTIONS = 64
_SUBJECT_BYTES = 128
_MICRO = 1000
# Does not quote the URL, which may contain a password.
_BAD_URL = (
    "the address of Redis is redis://[[user]:password@]host[:port][/database], or rediss:// for TLS, or unix:///path"
)

# Checks all limits before it charges any. In microseconds: Lua's numbers are exact up to 2^53.
_SCRIPT = """\
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local debts = {}
for i, key in ipairs(KEYS) do
  local debt = math.max(0, (tonumber(redis.call('GET', key)) or 0) - now) + tonumber(ARGV[2 * i - 1])
  if debt > tonumber(ARGV[2 * i]) then
    return {i, tonumber(ARGV[2 * i]) - debt}
  end
  debts[i] = debt
end
for i, key in ipairs(KEYS) do
  redis.call('SET', key, string.format('%.0f', now + debts[i]), 'PX', math.ceil(debts[i] / 1000))
end
return {0, unpack(debts)}
"""
_DIGEST = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()

OnDecision = Callable[[Decision], None]


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed Redis URL."""

    host: str = ""
    port: int = 0
    username: str = ""
    password: str = ""
    database: int = 0
    tls: bool = False
    path: str = ""
    """The path of a UNIX socket, in place of host and port."""

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Parse `redis://[[user]:password@]host[:port][/database]`, `rediss://...` or `unix://[...@]/path[?db=database]`."""
        # Not `redis.from_url`: it ignores a database that is not a number, and uses localhost if the host is missing.
        try:
            parts = urlsplit(url)
            port = parts.port or 6379
            unix = parts.scheme == "unix"
            database = int(parse_qs(parts.query).get("db", ["0"])[0] if unix else parts.path.strip("/") or 0)
        except ValueError:
            raise InvalidArgument(_BAD_URL) from None
        if parts.scheme not in ("redis", "rediss", "unix") or not (parts.path if unix else parts.hostname):
            raise InvalidArgument(_BAD_URL)
        login = unquote(parts.username or ""), unquote(parts.password or "")
        if unix:
            return cls("", 0, *login, database, path=unquote(parts.path))
        return cls(parts.hostname or "", port, *login, database, parts.scheme == "rediss")

    def __str__(self) -> str:
        """Return the address without the password."""
        return f"{self.path or f'{self.host}:{self.port}'}, database {self.database}"

    def client(self) -> Redis:
        """Return a client with a bounded pool, without retries: a request that fails is counted locally instead."""
        try:
            from redis.asyncio import (
                BlockingConnectionPool,
                Connection,
                Redis,
                SSLConnection,
                UnixDomainSocketConnection,
            )
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError:
            raise MissingExtra("a rate limit in Redis", "redis") from None
        options: dict[str, Any] = {
            "db": self.database,
            "username": self.username or None,
            "password": self.password or None,
            "protocol": 2,  # RESP3 needs Redis 6
            "driver_info": None,
            "socket_connect_timeout": _PING_SECONDS,
            "socket_timeout": None,
            "retry": Retry(NoBackoff(), 0),
            "max_connections": _CONNECTIONS,
            "timeout": None,
        }
        if self.path:
            pool = BlockingConnectionPool(connection_class=UnixDomainSocketConnection, path=self.path, **options)
        else:
            kind = SSLConnection if self.tls else Connection
            pool = BlockingConnectionPool(connection_class=kind, host=self.host, port=self.port, **options)
        return Redis.from_pool(pool)


class RedisRateLimiter:
    """The rate limits of one process, shared with all processes that use the same Redis."""

    def __init__(self, url: str, local: RateLimiter) -> None:
        self._address = RedisAddress.parse(url)
        self._client = self._address.client()
        self._local = local
        self._health_checks: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.connected = False
        """Whether Redis answered the last health check; while False, requests are counted locally."""
        self._reported_unavailable = False
        self._slow_answers = 0
        self._key_prefixes = [_key_prefix(rule) for rule in local.rules]
        intervals = [(max(1, rule.interval // _MICRO), rule.capacity) for rule in local.rules]
        self._arguments = [number for interval, capacity in intervals for number in (interval, interval * capacity)]

    def start(self) -> None:
        """Start the health checks, which connect and reconnect. Call it in the event loop."""
        if self._health_checks is None:
            self._health_checks = asyncio.get_running_loop().create_task(self._check_health())

    async def close(self) -> None:
        """Disconnect. Requests that wait for Redis are counted locally."""
        task, self._health_checks = self._health_checks, None
        self.connected = False
        tasks = [*self._tasks, task] if task is not None else list(self._tasks)
        for pending in tasks:
            pending.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def take(self, subjects: Sequence[bytes], now: float, on_decision: OnDecision) -> None:
        """Count one request; call `on_decision` now or later."""
        if not self.connected:
            on_decision(self._local.take(subjects, now))
            return
        task = asyncio.get_running_loop().create_task(self._take(subjects, now, on_decision))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, subjects: Sequence[bytes], now: float, on_decision: OnDecision) -> None:
        decision = None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                decision = self._decision(await self._run_script(subjects))
            self._slow_answers = 0
        except TimeoutError:
            self._slow_answers += 1
            if self._slow_answers >= _SLOW_ANSWERS:
                self._disconnected(f"{_SLOW_ANSWERS} answers took more than {ANSWER_SECONDS * 1000:g} ms")
        except Exception as error:
            # The connection is lost, or Redis answers and does not count: out of memory, read-only, loading.
            self._disconnected(_reason(error))
        finally:  # also when this task is cancelled
            on_decision(decision or self._local.take(subjects, now))

    async def _run_script(self, subjects: Sequence[bytes]) -> list[int]:
        from redis.exceptions import NoScriptError

        keys = [prefix + _shorten(subject) for prefix, subject in zip(self._key_prefixes, subjects, strict=True)]
        try:
            reply: list[int] = await self._client.evalsha(_DIGEST, len(keys), *keys, *self._arguments)
        except NoScriptError:
            reply = await self._client.eval(_SCRIPT, len(keys), *keys, *self._arguments)
        return reply

    def _decision(self, reply: list[int]) -> Decision:
        rules = self._local.rules
        refused, *debts = reply
        if refused:
            return rules[refused - 1], debts[0] * _MICRO
        decisions = [(rule, debt * _MICRO) for rule, debt in zip(rules, debts, strict=True)]
        return min(decisions, key=lambda decision: decision[0].remaining(decision[1]))

    async def _check_health(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_PING_SECONDS):
                    await self._client.ping()
            except Exception as error:
                self._disconnected(_reason(error))
            else:
                if not self.connected:
                    self.connected = True
                    self._reported_unavailable = False
                    log.info("rate limits are shared through Redis at %s", self._address)
            await asyncio.sleep(HEALTH_CHECK_SECONDS)

    def _disconnected(self, reason: str) -> None:
        self.connected = False
        self._slow_answers = 0
        if not self._reported_unavailable:
            self._reported_unavailable = True
            message = "rate limits are counted on this machine alone until Redis at %s is back: %s"
            log.warning(message, self._address, reason)


def _key_prefix(rule: RateRule) -> bytes:
    # The limit is part of the key, so that a changed limit does not read counts in other units.
    return b"headrace:rate:%d/%d/%d:" % (rule.requests, int(rule.seconds * 1000), rule.capacity)


def _shorten(subject: bytes) -> bytes:
    return subject if len(subject) <= _SUBJECT_BYTES else hashlib.sha256(subject).hexdigest().encode()


def _reason(error: Exception) -> str:
    """Return Redis's reply, or the kind of error. Neither contains the password."""
    from redis.exceptions import AuthenticationError, ResponseError

    if isinstance(error, AuthenticationError | ResponseError):
        return f"it says {str(error)[:200]!r}"
    return type(error.__cause__ or error.__context__ or error).__name__
