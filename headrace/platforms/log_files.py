# SPDX-License-Identifier: Apache-2.0
"""Log files of processes: read the last lines, drop the beginning, follow new lines.

A process has its log file open for appending, so truncating the file is safe for both sides.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

WINDOW_LINES = 2000
"""How many of the last lines `follow_log` compares; of a service that writes more between two reads it drops the middle."""
SKIPPED = "... (lines that were written faster than they could be read are left out)"

ReadTail = Callable[[int], Awaitable[str]]
IsAlive = Callable[[], Awaitable[bool]]


def last_lines(path: Path, tail: int, max_bytes: int) -> str:
    """Return the last lines, decoded whatever the bytes are; "" if there is no file."""
    if tail <= 0:
        return ""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            text = file.read(max_bytes).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.replace("\0", "\ufffd").splitlines()[-tail:])


def truncate_log(path: Path, max_bytes: int) -> None:
    """Drop the beginning of a log of more than twice `max_bytes`. Lines written at that very moment may be lost."""
    if os.stat(path).st_size <= 2 * max_bytes:
        return
    with path.open("r+b") as file:
        file.seek(-max_bytes, os.SEEK_END)
        tail = file.read(max_bytes)
        file.truncate(0)
    with path.open("ab") as file:
        file.write(tail[tail.find(b"\n") + 1 :])


async def follow_log(
    read: ReadTail,
    is_alive: IsAlive,
    tail: int,
    *,
    every_seconds: float = 0.5,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[str]:
    """Yield the last `tail` lines, then each new line until the service has ended. For drivers that only read tails."""
    before = (await read(WINDOW_LINES)).splitlines()
    for line in before[-tail:] if tail else []:
        yield line
    while True:
        # Asked before the read, so that the last lines of a service that has ended are read.
        alive = await is_alive()
        if alive:
            await pause(every_seconds)
        now = (await read(WINDOW_LINES)).splitlines()
        for line in new_lines(before, now):
            yield line
        before = now or before
        if not alive:
            return


def new_lines(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return the lines of `now` that follow the lines of `before`: the longest suffix of `before` that `now` starts with."""
    if not before:
        return list(now)
    for overlap in range(min(len(before), len(now)), 0, -1):
        if before[-overlap:] == now[:overlap]:
            return list(now[overlap:])
    return [SKIPPED, *now] if now else []
