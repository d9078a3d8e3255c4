# SPDX-License-Identifier: Apache-2.0
"""Work that may hang, off the loop: in a thread that the process does not wait for when it ends. Called by `steps`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result], name: str) -> Result:
    """Wait for something that blocks. Cancelling the wait does not end the work: give it a flag to look at."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(tell: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            tell(value)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            told: tuple[Callable[[Any], None], Any] = (future.set_exception, error)
        else:
            told = (future.set_result, result)
        call_in(loop, settle, *told)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Call something in the loop's thread; nothing happens once the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return
