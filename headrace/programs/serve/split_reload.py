# SPDX-License-Identifier: Apache-2.0
"""Reload traffic splits when the configuration file changes.

Only a change of the file counts, so splits set by the admin API stay until the file is written.
"""

from __future__ import annotations

import asyncio
import logging
import os

from headrace.core.errors import HeadraceError
from headrace.engine.traffic.splits import TrafficSplits
from headrace.programs.serve.settings import ServerSettings

log = logging.getLogger("headrace.apps")

_LOOK_SECONDS = 2.0


class SplitsFile:
    """Polls the file every two seconds; does nothing for a server without one."""

    def __init__(self, settings: ServerSettings, traffic: TrafficSplits, look_seconds: float = _LOOK_SECONDS) -> None:
        self._file = settings.traffic_file
        self._read = settings.traffic_again
        self._traffic = traffic
        self._look_seconds = look_seconds
        self._known = self._state()
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start polling, in the event loop."""
        if self._file and self._read is not None:
            self._looking = asyncio.create_task(self._look())

    def close(self) -> None:
        """Stop polling."""
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._look_seconds)
            state = self._state()
            if state is not None and state != self._known:
                self._known = state
                self._take()

    def _take(self) -> None:
        try:
            if self._read is not None:
                self._traffic.replace(self._read())
                log.info("%s has changed: its splits of traffic hold now", self._file)
        except HeadraceError as error:
            log.error("%s has changed, and its splits of traffic stay as they were: %s", self._file, error.message)

    def _state(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._file)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
