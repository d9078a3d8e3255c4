# SPDX-License-Identifier: Apache-2.0
"""The connections to one backend: those that wait for work, and how new ones are made.

`flows` takes one for each request; `upstream` connections put themselves back. HTTP/1.1 only: `h2` has its own.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING

from headrace.fleet.router.answers import Answers
from headrace.fleet.router.upstream import Upstream

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.customers import Applicant, Customer
    from headrace.fleet.router.settings import RouterSettings

log = logging.getLogger("headrace.router")


class CoarseClock:
    """The loop's time at the last tick: it costs nothing to read, and is right to a quarter of a second."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now


class Pool:
    """See the module. Used from the loop's thread only."""

    def __init__(self, backend: Backend, settings: RouterSettings, answers: Answers, clock: CoarseClock) -> None:
        self.backend = backend
        self.answers = answers
        self.clock = clock
        self.timeouts = settings.timeouts
        self.head_bytes = settings.answer_head_bytes
        self.whole_bytes = settings.whole_bytes
        self.idle: list[Upstream] = []
        """The one used last at the end: it is taken first, so that those not needed grow old and are closed."""
        self.all: set[Upstream] = set()
        self._most_idle = settings.idle_connections
        self._connecting: set[asyncio.Task[None]] = set()
        self._tls = backend_tls(settings) if backend.address.scheme == "https" else None
        host = backend.address.url.partition("://")[2].encode()
        self.tail = b"\r\n\r\n" if settings.keep_host else b"\r\nhost: %b\r\n\r\n" % host
        """What ends a request's head."""
        self.hostless_tail = b"\r\nhost: %b\r\n\r\n" % host
        """The same for a client that named no host."""

    def send(self, customer: Customer, text: bytes) -> Upstream | None:
        """Send a request, or its head, on a connection that waits for work; None if there is none."""
        idle = self.idle
        while idle:
            connection = idle.pop()
            transport = connection.transport
            if transport is not None and not transport.is_closing():
                connection.customer = customer
                connection.since = self.clock.now
                transport.write(text)
                return connection
        return None

    def give_back(self, connection: Upstream) -> None:
        """A connection has done its work."""
        connection.since = self.clock.now
        self.idle.append(connection)

    def connect(self, applicant: Applicant) -> None:
        """Make a connection for someone; they are called later, from the loop."""
        task = asyncio.get_running_loop().create_task(self._connect(applicant))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def lost(self, connection: Upstream) -> None:
        """A connection is gone."""
        self.all.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def sweep(self, now: float) -> None:
        """Keep the time limits of all connections, and the number of those without work."""
        for connection in tuple(self.all):
            connection.sweep(now)
        while len(self.idle) > self._most_idle:
            self.idle.pop(0).close()

    def close_idle(self) -> None:
        """The backend gets no requests for now: what it left open will be no good when it comes back."""
        idle, self.idle = self.idle, []
        for connection in idle:
            connection.close()

    async def close(self) -> None:
        """Close everything."""
        for task in tuple(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for connection in tuple(self.all):
            connection.abort()

    async def _connect(self, applicant: Applicant) -> None:
        address = self.backend.address
        seconds = self.timeouts.connect_seconds
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                _, connection = await loop.create_connection(
                    lambda: Upstream(self),
                    address.host,
                    address.port,
                    ssl=self._tls,
                    server_hostname=address.host if self._tls is not None else None,
                )
        except TimeoutError:
            applicant.unreachable(f"did not take a connection within {seconds:g} seconds")
        except OSError as error:
            log.debug("cannot connect to %s: %s", self.backend.name, error)
            applicant.unreachable("could not be reached")
        else:
            if not applicant.connected(connection):
                self.give_back(connection)


def backend_tls(settings: RouterSettings) -> ssl.SSLContext:
    """How https backends prove who they are."""
    context = ssl.create_default_context(cafile=settings.ca_file or None)
    context.set_alpn_protocols(["http/1.1"])
    return context
