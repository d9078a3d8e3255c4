# SPDX-License-Identifier: Apache-2.0
"""Whether a file has changed: asked for its number, time and size now and then. Used by `files` and `apps.router`.

A file that is replaced, as Kubernetes replaces those of a ConfigMap, has another number; one that is gone for a moment
has not changed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress

FILE_SECONDS = 0.5

Mark = tuple[int, int, int, int]


def mark_of(path: str) -> Mark | None:
    """What is different when the file is."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


async def changes(
    path: str, seconds: float = FILE_SECONDS, known: Mark | None = None, hurry: asyncio.Event | None = None
) -> AsyncIterator[None]:
    """Each time the file is another than it was; `known`: than what somebody has read already.

    `hurry`: set by who knows that it has changed.
    """
    while True:
        mark = mark_of(path)
        if mark is not None and mark != known:
            known = mark
            yield None
        if hurry is None:
            await asyncio.sleep(seconds)
            continue
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await hurry.wait()
        hurry.clear()
