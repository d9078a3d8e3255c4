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

_POLL_SECONDS = 2.0


class SplitsFile:
    """Polls the file every two seconds; does nothing for a server without one."""

    def __init__(self, settings: ServerSettings, traffic: TrafficSplits, poll_seconds: float = _POLL_SECONDS) -> None:
        self._file = settings.traffic_file
        self._read = settings.reload_traffic
        self._traffic = traffic
        self._poll_seconds = poll_seconds
        self._last_state = self._state()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start polling, in the event loop."""
        if self._file and self._read is not None:
            self._task = asyncio.create_task(self._poll())

    def close(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_seconds)
            state = self._state()
            if state is not None and state != self._last_state:
                self._last_state = state
                self._reload()

    def _reload(self) -> None:
        try:
            if self._read is not None:
                self._traffic.replace(self._read())
                log.info("%s has changed: its traffic splits are now in effect", self._file)
        except HeadraceError as error:
            log.error(
                "%s has changed, but its traffic splits are not used: %s",
                self._file,
                error.message,
            )

    def _state(self) -> tuple[int, int, int] | None:
        try:
            stat = os.stat(self._file)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
