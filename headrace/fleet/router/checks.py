# SPDX-License-Identifier: Apache-2.0
"""Active checks: asks each backend now and then whether it is well, and tells `backends`.

Started by `proxy`. Each check is a connection of its own: what it should find out is whether a new one works.
"""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import TYPE_CHECKING

from headrace.fleet.router.answers import BadAnswer, read_status
from headrace.fleet.router.pools import backend_tls

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.settings import RouterSettings

log = logging.getLogger("headrace.router")

_HEAD_BYTES = 16 * 1024


class HealthChecks:
    """One task for each backend."""

    def __init__(self, settings: RouterSettings, backends: Backends) -> None:
        self._settings = settings.health
        self._backends = backends
        self._tasks: dict[Backend, asyncio.Task[None]] = {}
        self._started = False
        self._tls_settings = settings
        https = any(backend.address.scheme == "https" for backend in backends.all)
        self._tls = backend_tls(settings) if https else None
        self._random = Random()  # noqa: S311 - spreads checks over time, hides nothing

    async def start(self) -> None:
        """Ask every backend once, and go on asking."""
        if self._settings.path:
            await asyncio.gather(*(self._check(backend) for backend in self._backends.all))
        self._started = True
        for backend in self._backends.all:
            self._begin(backend, at_once=False)

    def join(self, backend: Backend) -> None:
        """A backend has come: it is asked at once."""
        if self._started:
            self._begin(backend, at_once=True)

    def leave(self, backend: Backend) -> None:
        """A backend has gone."""
        task = self._tasks.pop(backend, None)
        if task is not None:
            task.cancel()

    def renew(self, settings: RouterSettings) -> None:
        """Other settings: everybody is asked anew, by these."""
        self._settings = settings.health
        for backend in tuple(self._tasks):
            self.leave(backend)
        for backend in self._backends.all:
            self.join(backend)

    def _begin(self, backend: Backend, *, at_once: bool) -> None:
        if self._settings.path:
            self._tasks[backend] = asyncio.create_task(self._go_on(backend, at_once=at_once))

    async def close(self) -> None:
        """Ask no more."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _go_on(self, backend: Backend, *, at_once: bool) -> None:
        interval = self._settings.interval_seconds
        if at_once:
            await self._check(backend)
        while True:
            # Not all at the same time, nor in step with those of other routers.
            await asyncio.sleep(interval * self._random.uniform(0.8, 1.2))
            await self._check(backend)

    async def answers(self, backend: Backend) -> bool:
        """Whether it answers now; without a path to ask for, whether it takes a connection. Changes nothing."""
        return (await self._look(backend))[0]

    async def _check(self, backend: Backend) -> None:
        healthy, why = await self._look(backend)
        self._backends.checked(backend, healthy, asyncio.get_running_loop().time(), why)

    async def _look(self, backend: Backend) -> tuple[bool, str]:
        seconds = self._settings.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                status = await self._ask(backend)
        except TimeoutError:
            return False, f"no answer to its check within {seconds:g} s"
        except OSError as error:
            return False, f"cannot be reached: {error.strerror or type(error).__name__}"
        except (BadAnswer, EOFError, asyncio.LimitOverrunError):
            return False, "its answer to the check is not HTTP/1.1"
        except Exception:
            log.exception("a check of %s failed", backend.name)
            return False, "the check failed; the router's log has more"
        healthy = 200 <= status < 300
        return healthy, "" if healthy else f"{self._settings.path} answered {status}"

    async def _ask(self, backend: Backend) -> int:
        address = backend.address
        if address.scheme == "https" and self._tls is None:
            self._tls = backend_tls(self._tls_settings)
        tls = self._tls if address.scheme == "https" else None
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls, limit=_HEAD_BYTES)
        try:
            if not self._settings.path:
                return 200
            host = address.url.partition("://")[2]
            writer.write(
                f"GET {self._settings.path} HTTP/1.1\r\nhost: {host}\r\nuser-agent: headrace-router\r\n"
                "connection: close\r\n\r\n".encode()
            )
            return read_status(await reader.readuntil(b"\r\n\r\n"))
        finally:
            writer.transport.abort()
