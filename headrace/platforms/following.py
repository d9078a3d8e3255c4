# SPDX-License-Identifier: Apache-2.0
"""A log as it grows, from drivers that only tell the last lines. Called by `launcher`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

WINDOW = 2000
"""So many last lines are compared; whoever writes more between two looks loses the middle, and is told so."""
LOST = "... (lines that were written faster than they could be read are left out)"

Read = Callable[[int], Awaitable[str]]
Lives = Callable[[], Awaitable[bool]]


def fresh_lines(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """The lines of `now` that come after those of `before`: the longest end of `before` that `now` begins with is known."""
    if not before:
        return list(now)
    for known in range(min(len(before), len(now)), 0, -1):
        if before[-known:] == now[:known]:
            return list(now[known:])
    return [LOST, *now] if now else []


async def follow(
    read: Read,
    lives: Lives,
    tail: int,
    *,
    every_seconds: float = 0.5,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[str]:
    """The last `tail` lines, then each new one until the service has ended."""
    before = (await read(WINDOW)).splitlines()
    for line in before[-tail:] if tail else []:
        yield line
    while True:
        # Asked first: what a service writes at its end is read after it has ended.
        more = await lives()
        if more:
            await pause(every_seconds)
        now = (await read(WINDOW)).splitlines()
        for line in fresh_lines(before, now):
            yield line
        before = now or before
        if not more:
            return
