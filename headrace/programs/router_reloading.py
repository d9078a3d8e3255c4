# SPDX-License-Identifier: Apache-2.0
"""A router's settings while it runs: read anew when their file changes, and on SIGHUP. Made by `apps.router`.

What is wrong in them is a warning, and the old ones go on; so are settings that need a new start.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.core.errors import HeadraceError
from headrace.fleet.router.discovery.watching import changes, mark_of

if TYPE_CHECKING:
    from headrace.fleet.router.proxy import RouterProxy
    from headrace.programs.router import RouterAppSettings

log = logging.getLogger("headrace.apps")

_FIXED = ("address", "tls", "limits", "grace_seconds", "access_log", "trace_endpoint")


class Reloading:
    """See the module."""

    def __init__(
        self, settings: RouterAppSettings, proxy: RouterProxy, reread: Callable[[], RouterAppSettings]
    ) -> None:
        self._settings = settings
        self._proxy = proxy
        self._reread = reread
        self._asked = asyncio.Event()
        self._mark = mark_of(settings.config) if settings.config else None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """From now on."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._asked.set)
        self._tasks = [loop.create_task(self._run())]
        if self._settings.config:
            self._tasks.append(loop.create_task(self._watch()))

    async def close(self) -> None:
        """No more."""
        if self._tasks:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        async for _ in changes(self._settings.config, known=self._mark):
            self._asked.set()

    async def _run(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            try:
                await self._reload()
            except HeadraceError as error:
                log.warning("the settings are left as they were: %s", error.message)
            except Exception:
                log.exception("the settings could not be read anew; they are left as they were")

    async def _reload(self) -> None:
        settings = self._reread()
        fixed = [name for name in _FIXED if getattr(settings, name) != getattr(self._settings, name)]
        fixed += await self._proxy.renew(settings.router)
        if fixed:
            log.warning("the settings were read anew, but these need a new start of the router: %s", ", ".join(fixed))
        else:
            log.info("the settings were read anew")
