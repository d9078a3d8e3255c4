# SPDX-License-Identifier: Apache-2.0
"""Rate limits that several machines share, counted in Redis by a script there: at once, or not at all.

Asked by the guards of `apps` where the settings have a `redis_url`. The clock is that of Redis, so machines need not agree
on the time. While Redis is away or slow, each machine counts for itself (`rates`); no request waits longer for it than
`ANSWER_SECONDS`, and none at all once it is known to be away. Speaks through `redis_wire`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headrace.api.access.rates import Rates, Rule, Verdict
from headrace.api.access.redis_wire import RedisAddress, RedisError, RedisWire
from headrace.core.errors import Unavailable

log = logging.getLogger("headrace.guard")

ANSWER_SECONDS = 0.05
AGAIN_SECONDS = 1.0
_SLOW_ANSWERS = 5
"""So many answers in a row that came too late make Redis one that is away."""
_SUBJECT_BYTES = 128
_MICRO = 1000

# All limits are looked at before any is charged. Microseconds: Lua's numbers are exact up to 2^53 of them.
_SCRIPT = b"""\
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local owed = {}
for i, key in ipairs(KEYS) do
  local owes = math.max(0, (tonumber(redis.call('GET', key)) or 0) - now) + tonumber(ARGV[2 * i - 1])
  if owes > tonumber(ARGV[2 * i]) then
    return {i, tonumber(ARGV[2 * i]) - owes}
  end
  owed[i] = owes
end
for i, key in ipairs(KEYS) do
  redis.call('SET', key, string.format('%.0f', now + owed[i]), 'PX', math.ceil(owed[i] / 1000))
end
return {0, unpack(owed)}
"""
_DIGEST = hashlib.sha1(_SCRIPT, usedforsecurity=False).hexdigest()

Tell = Callable[[Verdict], None]


class RedisRates:
    """The limits of one process, shared with whoever uses the same Redis."""

    def __init__(self, url: str, own: Rates) -> None:
        self._address = RedisAddress.parse(url)
        self._own = own
        self._wire: RedisWire | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._slow = 0
        self._away = False
        self._words = [_words(rule) for rule in own.rules]
        intervals = [(max(1, rule.interval // _MICRO), rule.capacity) for rule in own.rules]
        self._arguments = [
            b"%d" % number for interval, capacity in intervals for number in (interval, interval * capacity)
        ]

    def start(self) -> None:
        """Begin to connect, and to connect again whenever that is needed. In the loop."""
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._stay_connected())

    async def close(self) -> None:
        """Disconnect."""
        task, self._connecting = self._connecting, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._wire is not None:
            self._wire.close()

    def take(self, subjects: Sequence[bytes], now: float, tell: Tell) -> None:
        """Count one request; `tell` is called with the verdict, now or later."""
        wire = self._wire
        if wire is None or not wire.open:
            tell(self._own.take(subjects, now))
            return
        self._ask(wire, b"EVALSHA", _DIGEST.encode(), subjects, now, tell)

    def _ask(
        self, wire: RedisWire, verb: bytes, script: bytes, subjects: Sequence[bytes], now: float, tell: Tell
    ) -> None:
        keys = [word + _fit(subject) for word, subject in zip(self._words, subjects, strict=True)]
        answer = wire.command(verb, script, b"%d" % len(keys), *keys, *self._arguments)
        timer = asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._give_up, wire, answer)
        answer.add_done_callback(partial(self._answered, wire, timer, subjects, now, tell))

    def _answered(
        self,
        wire: RedisWire,
        timer: asyncio.TimerHandle,
        subjects: Sequence[bytes],
        now: float,
        tell: Tell,
        answer: asyncio.Future[Any],
    ) -> None:
        timer.cancel()
        if answer.cancelled():
            tell(self._own.take(subjects, now))
            return
        error = answer.exception()
        if isinstance(error, RedisError) and error.message.startswith("NOSCRIPT"):
            self._ask(wire, b"EVAL", _SCRIPT, subjects, now, tell)
            return
        if error is not None:
            if isinstance(error, RedisError):
                # It answers, but does not count: out of memory, read-only, loading. Another connection may find it well.
                self._lost(wire, f"it says {error.message[:200]!r}")
            tell(self._own.take(subjects, now))
            return
        self._slow = 0
        tell(self._verdict(answer.result()))

    def _verdict(self, reply: list[int]) -> Verdict:
        rules = self._own.rules
        refused, *owed = reply
        if refused:
            return rules[refused - 1], owed[0] * _MICRO
        verdicts = [(rule, owes * _MICRO) for rule, owes in zip(rules, owed, strict=True)]
        return min(verdicts, key=lambda verdict: verdict[0].remaining(verdict[1]))

    def _give_up(self, wire: RedisWire, answer: asyncio.Future[Any]) -> None:
        if not answer.done():
            self._slow += 1
            answer.cancel()
            if self._slow >= _SLOW_ANSWERS:
                self._lost(wire, f"{_SLOW_ANSWERS} answers took more than {ANSWER_SECONDS * 1000:g} ms")

    def _lost(self, wire: RedisWire, why: str) -> None:
        self._slow = 0
        if self._wire is wire:
            self._wire = None
            wire.close()
            self._tell_away(why)

    async def _stay_connected(self) -> None:
        while True:
            if self._wire is None or not self._wire.open:
                if self._wire is not None:
                    self._wire = None
                    self._tell_away("it closed the connection")
                await self._connect()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _connect(self) -> None:
        try:
            # The script goes there with the first request: see `_answered`.
            self._wire = await RedisWire.connect(self._address)
        except Unavailable as error:
            self._tell_away(error.message)
        else:
            self._away = False
            log.info("rate limits are shared through Redis at %s", self._address)

    def _tell_away(self, why: str) -> None:
        if not self._away:
            self._away = True
            text = "rate limits are counted on this machine alone until Redis at %s is back: %s"
            log.warning(text, self._address, why)


def _words(rule: Rule) -> bytes:
    # Of the limit itself, so that a limit that was changed begins anew instead of judging by other numbers.
    return b"headrace:rate:%d/%d/%d:" % (rule.requests, int(rule.seconds * 1000), rule.capacity)


def _fit(subject: bytes) -> bytes:
    return subject if len(subject) <= _SUBJECT_BYTES else hashlib.sha256(subject).hexdigest().encode()
