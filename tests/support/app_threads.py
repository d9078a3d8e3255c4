# SPDX-License-Identifier: Apache-2.0
"""A program's main coroutine in a thread of this process: the same code as in a process, but its signals come from the test.

program = AppThread(lambda: app._run(settings))
program.start()                      # returns when it waits for a signal: its ports listen
program.send(signal.SIGTERM)
assert program.wait() == 0
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import patch

import uvloop

from headrace.net import server as wire_server

_START_SECONDS, _STOP_SECONDS = 240.0, 120.0
_ONE_AT_A_TIME = threading.Lock()


class AppThread:
    """For programs that end by `run_until_signal`."""

    def __init__(self, main: Callable[[], Coroutine[Any, Any, int]]) -> None:
        self._main = main
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._waits = threading.Event()
        self._signals: _Signals | None = None
        self._outcome: int | BaseException | None = None

    def start(self) -> None:
        """Start it, and wait until it serves, or has ended."""
        with _ONE_AT_A_TIME, patch.object(wire_server, "_Signals", self._make_signals):
            self._thread.start()
            assert self._waits.wait(_START_SECONDS), "it did not start"

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def send(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Do as if the process had got a signal."""
        assert self._signals is not None, self._outcome
        self._signals.send(number)

    def wait(self) -> int:
        """Its exit code, when it has ended; raises what it ended with."""
        self._thread.join(_STOP_SECONDS)
        assert not self._thread.is_alive(), "it did not end"
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return int(self._outcome or 0)

    def _run(self) -> None:
        try:
            self._outcome = uvloop.run(self._main())
        except BaseException as error:
            self._outcome = error
        finally:
            self._waits.set()

    def _make_signals(self, loop: asyncio.AbstractEventLoop) -> _Signals:
        self._signals = _Signals(loop)
        self._waits.set()
        return self._signals


class _Signals:
    """Stands in for `headrace.net.server._Signals`, which only the main thread can have."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[signal.Signals] = asyncio.Queue()

    def send(self, number: signal.Signals) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, number)

    async def next(self) -> signal.Signals:
        return await self._queue.get()

    def close(self) -> None:
        pass
