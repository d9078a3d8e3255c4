# SPDX-License-Identifier: Apache-2.0
"""Follows the configuration file: what it says of splits holds while the server runs, without a restart.

Made by `server`. Only a change of the file counts, so what the admin API has set stays until somebody writes the file.
"""

from __future__ import annotations

import asyncio
import logging
import os

from headrace.core.errors import HeadraceError
from headrace.engine.traffic.traffic import Traffic
from headrace.programs.serve.settings import ServerSettings

log = logging.getLogger("headrace.apps")

_LOOK_SECONDS = 2.0


class SplitsFile:
    """Looks at the file every two seconds; does nothing for a server without one."""

    def __init__(self, settings: ServerSettings, traffic: Traffic, look_seconds: float = _LOOK_SECONDS) -> None:
        self._file = settings.traffic_file
        self._read = settings.traffic_again
        self._traffic = traffic
        self._look_seconds = look_seconds
        self._known = self._state()
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look. In the loop."""
        if self._file and self._read is not None:
            self._looking = asyncio.create_task(self._look())

    def close(self) -> None:
        """Look no more."""
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
