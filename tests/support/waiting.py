# SPDX-License-Identifier: Apache-2.0
"""Wait for something to become true: `eventually` for threads and processes, `eventually_async` inside an event loop.

eventually(lambda: server.connections() == 0)
row = eventually(lambda: find_row(name), message="the row never came")
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
_WITHIN = 100.0
"""Seconds. Generous, since a busy machine must not fail a test: a check that comes true returns at once."""


def eventually(check: Callable[[], Any], *, within: float = _WITHIN, message: str | Callable[[], object] = "") -> Any:
    """Call `check` until its result is true, and return that result. An AssertionError inside `check` means "not yet".

    `message` is part of the failure; a function is called for it then.
    """
    for pause in _pauses(within):
        found, why = _try(check)
        if found:
            return found
        time.sleep(pause)
    raise AssertionError(_explain(check, within, message, *_try(check)))


async def eventually_async(
    check: Callable[[], Any],
    *,
    within: float = _WITHIN,
    message: str | Callable[[], object] = "",
    longest_pause: float = _LONGEST_PAUSE,
) -> Any:
    """As `eventually`, for a coroutine; `check` may be a coroutine function. Seconds are those of the loop."""
    for pause in _pauses(within, asyncio.get_running_loop().time, longest_pause):
        found, why = _try(check)
        if inspect.isawaitable(found):
            try:
                found = await found
            except AssertionError:
                found = None
        if found:
            return found
        await asyncio.sleep(pause)
    raise AssertionError(_explain(check, within, message, None, None))


def _pauses(
    within: float, now: Callable[[], float] = time.monotonic, longest: float = _LONGEST_PAUSE
) -> Iterator[float]:
    """Short pauses first, so that quick things are seen quickly; longer ones later."""
    end = now() + within
    pause = _FIRST_PAUSE
    while now() < end:
        yield pause
        pause = min(pause * 1.5, longest)


def _try(check: Callable[[], Any]) -> tuple[Any, AssertionError | None]:
    try:
        return check(), None
    except AssertionError as error:
        return None, error


def _explain(
    check: Callable[[], Any],
    within: float,
    message: str | Callable[[], object],
    last: Any,
    why: AssertionError | None,
) -> str:
    reported = message() if callable(message) else message
    name = getattr(check, "__qualname__", repr(check))
    return f"{reported or name} was not true within {within:g} s; last: {why if why is not None else last!r}"
