# SPDX-License-Identifier: Apache-2.0
"""Active checks: asks each backend now and then whether it is well, and tells `backends`.

Started by `proxy`. Each check is a connection of its own: what it should find out is whether a new one works.
"""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import TYPE_CHECKING

from headrace.router.answers import BadAnswer, read_status
from headrace.router.pools import backend_tls

if TYPE_CHECKING:
    from headrace.router.backends import Backend, Backends
    from headrace.router.settings import RouterSettings

log = logging.getLogger("headrace.router")

_HEAD_BYTES = 16 * 1024


class HealthChecks:
    """One task for each backend."""

    def __init__(self, settings: RouterSettings, backends: Backends) -> None:
        self._settings = settings.health
        self._backends = backends
        self._tasks: list[asyncio.Task[None]] = []
        https = any(backend.address.scheme == "https" for backend in backends.all)
        self._tls = backend_tls(settings) if https else None
        self._random = Random()  # noqa: S311 - spreads checks over time, hides nothing

    async def start(self) -> None:
        """Ask every backend once, and go on asking."""
        if not self._settings.path:
            return
        await asyncio.gather(*(self._check(backend) for backend in self._backends.all))
        self._tasks = [asyncio.create_task(self._go_on(backend)) for backend in self._backends.all]

    async def close(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _go_on(self, backend: Backend) -> None:
        interval = self._settings.interval_seconds
        while True:
            # Not all at the same time, nor in step with those of other routers.
            await asyncio.sleep(interval * self._random.uniform(0.8, 1.2))
            await self._check(backend)

    async def _check(self, backend: Backend) -> None:
        seconds = self._settings.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                status = await self._ask(backend)
        except TimeoutError:
            healthy, why = False, f"no answer to its check within {seconds:g} s"
        except OSError as error:
            healthy, why = False, f"cannot be reached: {error.strerror or type(error).__name__}"
        except (BadAnswer, EOFError, asyncio.LimitOverrunError):
            healthy, why = False, "its answer to the check is not HTTP/1.1"
        except Exception:
            log.exception("a check of %s failed", backend.name)
            healthy, why = False, "the check failed; the router's log has more"
        else:
            healthy = 200 <= status < 300
            why = "" if healthy else f"{self._settings.path} answered {status}"
        self._backends.checked(backend, healthy, asyncio.get_running_loop().time(), why)

    async def _ask(self, backend: Backend) -> int:
        address = backend.address
        tls = self._tls if address.scheme == "https" else None
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls, limit=_HEAD_BYTES)
        try:
            host = address.url.partition("://")[2]
            writer.write(
                f"GET {self._settings.path} HTTP/1.1\r\nhost: {host}\r\nuser-agent: headrace-router\r\n"
                "connection: close\r\n\r\n".encode()
            )
            return read_status(await reader.readuntil(b"\r\n\r\n"))
        finally:
            writer.transport.abort()
