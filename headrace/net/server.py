# SPDX-License-Identifier: Apache-2.0
"""Servers: listen, sweep connections once a second for timeouts, and drain without losing a client.

Programs make `HttpServer`s, start them, and wait in `run_until_signal`. The protocol factory makes connections, which
register themselves in their site; this module does not know their protocol.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

from headrace.net.site import Connection, Site
from headrace.net.sockets import BACKLOG, Address, Listener
from headrace.net.tls import ReloadingTlsContext, TlsFiles

log = logging.getLogger("headrace.wire")

SWEEP_SECONDS = 1.0
IDLE_SWEEP_SECONDS = 60.0
"""Interval while there are no connections: many idle servers on one machine should cost nothing."""
SETTLE_SECONDS = 0.25
"""How long a draining server waits for a TCP handshake in progress, or the first bytes of a new connection."""
SAME_SIGNAL_SECONDS = 1.0
"""Signals closer together count as one: a terminal or systemd signals a worker, and so does its supervisor."""

_POLL_SECONDS = 0.05


class HttpServer:
    """One listening address of a site. Used from the loop's thread only."""

    def __init__(
        self,
        site: Site,
        address: Address,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        *,
        tls: TlsFiles | None = None,
        reuse_port: bool = False,
        unix_mode: int = 0o600,
    ) -> None:
        self.site = site
        self.address = address
        """As configured; after `start`, with the real port."""
        self._protocol_factory = protocol_factory
        self._tls_files = tls
        self._reuse_port = reuse_port
        self._unix_mode = unix_mode
        self._tls: ReloadingTlsContext | None = None
        self._listener: Listener | None = None
        self._asyncio_server: _AsyncioServer | None = None
        self._closing: set[asyncio.Task[Any]] = set()
        """One task for each closed asyncio server and each adopted socket; it ends with their last connection."""
        self._renewal: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle = False
        """Whether the next sweep is `IDLE_SWEEP_SECONDS` away, since there are no connections."""
        self._skipped = False
        """Whether the last sweep was skipped because the event loop had stalled."""

    @property
    def port(self) -> int:
        """The TCP port; 0 before `start` if the kernel is to choose it, and for a UNIX socket."""
        return self.address.port

    async def start(self) -> None:
        """Listen. Raises `InvalidArgument` or `FailedPrecondition`, with advice, if that is not possible."""
        loop = asyncio.get_running_loop()
        self.site.tick(loop.time())
        self._tls = ReloadingTlsContext(self._tls_files) if self._tls_files is not None else None
        self._listener = Listener(self.address, reuse_port=self._reuse_port, unix_mode=self._unix_mode)
        self.address = self._listener.address
        try:
            await self._accept()
        except BaseException:
            self._listener.close()
            raise
        self._timer = loop.call_later(SWEEP_SECONDS, self._tick)
        log.info("listening on %s%s", self.address, " with TLS" if self._tls is not None else "")

    async def drain(self, grace_seconds: float) -> int:
        """Drain this server alone; servers that share a site need `drain_servers`."""
        return await drain_servers([self], grace_seconds)

    def abort(self) -> None:
        """Close everything at once."""
        self.site.draining = True
        self._close()
        for connection in tuple(self.site.connections):
            _guarded(connection.abort)

    async def stop_accepting(self) -> None:
        """Accept the connections that the kernel has completed, and no more. The first step of a drain."""
        listener = self._listener
        if listener is None:
            return
        if listener.refuse_new():
            await asyncio.sleep(SETTLE_SECONDS)
        if self._renewal is not None:
            await asyncio.wait([self._renewal])
        await self._replace_asyncio_server(None)
        accepted = listener.accept_backlog()
        listener.close()
        self._listener = None
        if accepted:
            log.info("adopted %d waiting connections of %s", len(accepted), self.address)
        for sock in accepted:
            self._watch(asyncio.ensure_future(self._adopt(sock)))

    @property
    def unfinished(self) -> bool:
        """Whether connections may exist that are not in their site yet: those in a TLS handshake."""
        return bool(self._closing)

    async def _accept(self) -> None:
        if self._listener is None:
            return
        context = self._tls.context if self._tls is not None else None
        handshake, shutdown = self._tls_seconds()
        server = await asyncio.get_running_loop().create_server(
            self._factory,
            sock=self._listener.duplicate(),
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=handshake,
            ssl_shutdown_timeout=shutdown,
        )
        await self._replace_asyncio_server(_AsyncioServer(server, context))

    def _tls_seconds(self) -> tuple[float, float] | tuple[None, None]:
        """Return the timeouts of a TLS handshake and of a TLS shutdown, which ends connections of slow readers."""
        if self._tls is None:
            return None, None
        return self.site.limits.header_seconds, self.site.limits.write_idle_seconds

    async def _replace_asyncio_server(self, new: _AsyncioServer | None) -> None:
        """Close the current asyncio server; its connections stay open, also those that it is about to set up."""
        old, self._asyncio_server = self._asyncio_server, new
        if old is None:
            return
        try:
            await old.stop_accepting()
        finally:
            self._close_asyncio_server(old)

    def _close_asyncio_server(self, server: _AsyncioServer) -> None:
        server.server.close()
        self._watch(server.ended)

    def _watch(self, task: asyncio.Task[Any]) -> None:
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _adopt(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        context = self._tls.context if self._tls is not None else None
        handshake, shutdown = self._tls_seconds()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._factory, sock, ssl=context, ssl_handshake_timeout=handshake, ssl_shutdown_timeout=shutdown
            )
        except OSError as error:  # closed already, or a failed handshake
            log.debug("adopted connection of %s failed: %s", self.address, error)

    def _factory(self) -> asyncio.BaseProtocol:
        """Make the protocol of a new connection."""
        if self._idle and self._timer is not None and not self._timer.cancelled():
            # The site's clock is old while idle: set it before the connection uses it.
            self._timer.cancel()
            self._tick(woken=True)
        return self._protocol_factory()

    def _tick(self, *, woken: bool = False) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        site = self.site
        # After a stall of this event loop, requests that have arrived are not read yet: clients must not time out for it.
        stalled = not woken and self._timer is not None and now - self._timer.when() > SWEEP_SECONDS
        self._skipped = stalled and not self._skipped
        # Certificates are checked every second, idle or not.
        self._idle = not woken and not site.connections and self._tls is None
        self._timer = loop.call_later(IDLE_SWEEP_SECONDS if self._idle else SWEEP_SECONDS, self._tick)
        if now - site.now >= SWEEP_SECONDS / 2:  # else another server of the same site has just done it
            site.tick(now)
            for connection in () if self._skipped else tuple(site.connections):
                _guarded(connection.sweep, now)
        if self._tls is not None and self._asyncio_server is not None and self._renewal is None:
            self._tls.refresh()
            if self._tls.context is not self._asyncio_server.context:
                self._renewal = loop.create_task(self._renew())

    async def _renew(self) -> None:
        try:
            await self._accept()
        except OSError:  # perhaps no descriptors left; the next tick tries again
            log.exception("cannot use the new TLS files on %s yet", self.address)
        else:
            if self._tls_files is not None:
                paths = ", ".join(self._tls_files.paths())
                log.info("TLS files reloaded: %s, for new connections to %s", paths, self.address)
        finally:
            self._renewal = None

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._renewal is not None:
            self._renewal.cancel()
        if self._asyncio_server is not None:
            self._close_asyncio_server(self._asyncio_server)
            self._asyncio_server = None
        for task in tuple(self._closing):
            task.cancel()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class _AsyncioServer:
    """An asyncio server, the TLS context it uses, and the end of its last connection."""

    def __init__(self, server: asyncio.Server, context: object) -> None:
        self.server = server
        self.context = context
        # Started before close(): afterwards uvloop's wait_closed returns at once, even with open connections.
        self.ended = asyncio.ensure_future(server.wait_closed())

    async def stop_accepting(self) -> None:
        """Accept no more, and set up what is accepted.

        asyncio's own loop sets up an accepted connection one iteration later. If the server is closed in between, it drops
        the connection without closing its socket, and the client waits. uvloop sets it up at once.
        """
        loop = asyncio.get_running_loop()
        if isinstance(loop, asyncio.SelectorEventLoop):
            for sock in self.server.sockets:
                loop.remove_reader(sock)
            await asyncio.sleep(0)


async def drain_servers(servers: Sequence[HttpServer], grace_seconds: float) -> int:
    """Stop accepting, let every connection finish its requests, and close. Return how many had to be cut."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_seconds
    sites = list({id(server.site): server.site for server in servers}.values())
    for site in sites:
        site.draining = True
    drainer = _ConnectionDrainer(sites)
    drainer.poll(loop.time())
    await asyncio.gather(*(server.stop_accepting() for server in servers))
    while any(site.connections for site in sites) or any(server.unfinished for server in servers):
        now = loop.time()
        if now >= deadline:
            break
        drainer.poll(now)
        await asyncio.sleep(min(_POLL_SECONDS, deadline - now))
    cut = await _cut(sites)
    for server in servers:
        server._close()
    if cut:
        log.warning("draining took longer than %g s: %d connections were cut", grace_seconds, cut)
    return cut


class _ConnectionDrainer:
    """Drains each connection, once, `SETTLE_SECONDS` after it was first seen.

    Not at once: a connection that looks idle may have an unread request in its socket, above all if it is new.
    Connections still appear during a drain, as TLS handshakes end.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = sites
        self._seen: dict[Connection, float] = {}
        self._drained: set[Connection] = set()

    def poll(self, now: float) -> None:
        for site in self._sites:
            for connection in tuple(site.connections):
                if connection not in self._drained and now - self._seen.setdefault(connection, now) >= SETTLE_SECONDS:
                    self._drained.add(connection)
                    _guarded(connection.drain)


async def _cut(sites: Sequence[Site]) -> int:
    """End the remaining connections after the grace period: with an error where possible, then at once."""
    count = sum(len(site.connections) for site in sites)
    for graceful in (True, False):
        for connection in [connection for site in sites for connection in site.connections]:
            _guarded(connection.expire if graceful else connection.abort)
        for _ in range(20):  # connection_lost is called a turn later
            if not any(site.connections for site in sites):
                break
            await asyncio.sleep(_POLL_SECONDS)
    return count


def _guarded(callback: Callable[..., None], *args: object) -> None:
    """Call a connection; log an exception, so that the other connections are called too."""
    try:
        callback(*args)
    except Exception:
        log.exception("%s failed", getattr(callback, "__qualname__", callback))


async def run_until_signal(
    servers: Sequence[HttpServer], grace_seconds: float, *, on_signal: Callable[[], None] | None = None
) -> int:
    """Serve until SIGTERM or SIGINT, then drain all servers at once. Return the exit code of the process.

    `on_signal` is called first, so that a program can report not ready before it stops accepting.

    The code is 0 after a clean drain, and 1 if connections had to be cut at the end of the grace period. A second signal
    cuts all connections; the code is then 128 plus its number.
    """
    loop = asyncio.get_running_loop()
    signals = _Signals(loop)
    try:
        first = await signals.next()
        log.info("%s: draining for at most %g s", first.name, grace_seconds)
        if on_signal is not None:
            on_signal()
        draining = asyncio.ensure_future(drain_servers(servers, grace_seconds))
        second = asyncio.ensure_future(signals.next())
        await asyncio.wait([draining, second], return_when=asyncio.FIRST_COMPLETED)
        second.cancel()
        if draining.done():
            return 1 if draining.result() else 0
        draining.cancel()
        for server in servers:
            server.abort()
        await asyncio.wait([draining])
        log.warning("%s again: stopped without waiting", second.result().name)
        return 128 + second.result()
    finally:
        signals.close()


class _Signals:
    """SIGTERM and SIGINT as a queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._last = float("-inf")
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived, number)

    def _arrived(self, number: signal.Signals) -> None:
        now = self._loop.time()
        if now - self._last >= SAME_SIGNAL_SECONDS:
            self._last = now
            self._queue.put_nowait(number)

    async def next(self) -> signal.Signals:
        return await self._queue.get()

    def close(self) -> None:
        """Remove the handlers, but not while a copy of the last signal may still arrive: it would kill the process."""
        self._loop.call_later(max(0.0, self._last + SAME_SIGNAL_SECONDS - self._loop.time()), self._remove_handlers)

    def _remove_handlers(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
