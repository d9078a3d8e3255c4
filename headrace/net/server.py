# SPDX-License-Identifier: Apache-2.0
"""Sites on sockets: listening, the sweep once a second while anybody is connected, and draining without losing a client.

Composition roots make `WireServer`s, start them, and wait in `run_until_signal`. Connections come from the protocol
factory and register themselves in their site; this module knows nothing of what they speak.
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
from headrace.net.tls import TlsContexts, TlsFiles

log = logging.getLogger("headrace.wire")

SWEEP_SECONDS = 1.0
REST_SECONDS = 60.0
"""Between two looks while nobody is connected: many idle servers on one machine should cost it nothing."""
SETTLE_SECONDS = 0.25
"""How long a draining server waits for what has begun: a TCP handshake, or the first bytes of a new connection."""
SAME_SIGNAL_SECONDS = 1.0
"""Signals closer together count as one: a terminal or systemd signals a worker, and its supervisor does so too."""

_POLL_SECONDS = 0.05


class WireServer:
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
        """As asked; after `start`, with the real port."""
        self._make = protocol_factory
        self._tls_files = tls
        self._reuse_port = reuse_port
        self._unix_mode = unix_mode
        self._tls: TlsContexts | None = None
        self._listener: Listener | None = None
        self._accepting: _Accepting | None = None
        self._retired: set[asyncio.Task[Any]] = set()
        """One task for each accept handle given up and each adopted socket; it ends with their last connection."""
        self._renewal: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._resting = False
        """Whether the next look is far away, since there is nothing to look at."""

    @property
    def port(self) -> int:
        """The TCP port; 0 before `start` if the kernel is to choose it, and for a UNIX socket."""
        return self.address.port

    async def start(self) -> None:
        """Listen. Raises `InvalidArgument` or `FailedPrecondition` with advice when that cannot be."""
        loop = asyncio.get_running_loop()
        self.site.tick(loop.time())
        self._tls = TlsContexts(self._tls_files) if self._tls_files is not None else None
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
        """Drain this server alone; see `drain_servers`, which servers that share a site need."""
        return await drain_servers([self], grace_seconds)

    def abort(self) -> None:
        """Close everything at once."""
        self.site.draining = True
        self._close()
        for connection in tuple(self.site.connections):
            _guarded(connection.abort)

    async def stop_accepting(self) -> None:
        """Take the connections that the kernel has completed, and no others. The first step of a drain."""
        listener = self._listener
        if listener is None:
            return
        if listener.turn_away():
            await asyncio.sleep(SETTLE_SECONDS)
        if self._renewal is not None:
            await asyncio.wait([self._renewal])
        self._retire()
        taken = listener.take_backlog()
        listener.close()
        self._listener = None
        if taken:
            log.info("adopted %d waiting connections of %s", len(taken), self.address)
        for sock in taken:
            self._watch(asyncio.ensure_future(self._adopt(sock)))

    @property
    def unfinished(self) -> bool:
        """Whether connections may exist that their site does not know yet: those in a TLS handshake."""
        return bool(self._retired)

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
        self._retire()
        self._accepting = _Accepting(server, context)

    def _tls_seconds(self) -> tuple[float, float] | tuple[None, None]:
        """The longest handshake, and the longest time from `close` to the end: it cuts what a slow reader left."""
        if self._tls is None:
            return None, None
        return self.site.limits.header_seconds, self.site.limits.write_idle_seconds

    def _retire(self) -> None:
        """Stop the present accept handle; its connections go on."""
        if self._accepting is not None:
            self._accepting.server.close()
            self._watch(self._accepting.ended)
            self._accepting = None

    def _watch(self, task: asyncio.Task[Any]) -> None:
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)

    async def _adopt(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        context = self._tls.context if self._tls is not None else None
        handshake, shutdown = self._tls_seconds()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._factory, sock, ssl=context, ssl_handshake_timeout=handshake, ssl_shutdown_timeout=shutdown
            )
        except OSError as error:  # gone already, or a failed handshake
            log.debug("an adopted connection of %s failed: %s", self.address, error)

    def _factory(self) -> asyncio.BaseProtocol:
        """For each connection that comes."""
        if self._resting and self._timer is not None and not self._timer.cancelled():
            # The clock has stood still, and nobody may be served by an old one.
            self._timer.cancel()
            self._tick(woken=True)
        return self._make()

    def _tick(self, *, woken: bool = False) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        site = self.site
        # Certificates are looked at as often as ever.
        self._resting = not woken and not site.connections and self._tls is None
        self._timer = loop.call_later(REST_SECONDS if self._resting else SWEEP_SECONDS, self._tick)
        if now - site.now >= SWEEP_SECONDS / 2:  # else another server of the same site has just done it
            site.tick(now)
            for connection in tuple(site.connections):
                _guarded(connection.sweep, now)
        if self._tls is not None and self._accepting is not None and self._renewal is None:
            self._tls.refresh()
            if self._tls.context is not self._accepting.context:
                self._renewal = loop.create_task(self._renew())

    async def _renew(self) -> None:
        try:
            await self._accept()
        except OSError:  # no descriptors left, perhaps; the next tick tries again
            log.exception("cannot take new TLS files into use on %s yet", self.address)
        finally:
            self._renewal = None

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._renewal is not None:
            self._renewal.cancel()
        self._retire()
        for task in tuple(self._retired):
            task.cancel()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class _Accepting:
    """An accept handle of the loop, the TLS context it uses, and the end of its last connection."""

    def __init__(self, server: asyncio.AbstractServer, context: object) -> None:
        self.server = server
        self.context = context
        # Begun before close(): afterwards uvloop's wait_closed returns at once, whoever is still connected.
        self.ended = asyncio.ensure_future(server.wait_closed())


async def drain_servers(servers: Sequence[WireServer], grace_seconds: float) -> int:
    """Stop accepting, let every connection finish what it began, and close. Returns how many had to be cut."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_seconds
    sites = list({id(server.site): server.site for server in servers}.values())
    for site in sites:
        site.draining = True
    told = _Told(sites)
    told.look(loop.time())
    await asyncio.gather(*(server.stop_accepting() for server in servers))
    while any(site.connections for site in sites) or any(server.unfinished for server in servers):
        now = loop.time()
        if now >= deadline:
            break
        told.look(now)
        await asyncio.sleep(min(_POLL_SECONDS, deadline - now))
    cut = await _cut(sites)
    for server in servers:
        server._close()
    if cut:
        log.warning("draining took longer than %g s: %d connections were cut", grace_seconds, cut)
    return cut


class _Told:
    """Tells each connection to drain, once, when it has been known for a moment.

    Not at once: a request may lie unread in the socket of a connection that looks idle, the more so if it is new.
    Connections go on to appear during a drain, as TLS handshakes end.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = sites
        self._seen: dict[Connection, float] = {}
        self._told: set[Connection] = set()

    def look(self, now: float) -> None:
        for site in self._sites:
            for connection in tuple(site.connections):
                if connection not in self._told and now - self._seen.setdefault(connection, now) >= SETTLE_SECONDS:
                    self._told.add(connection)
                    _guarded(connection.drain)


async def _cut(sites: Sequence[Site]) -> int:
    """The grace is over: tell the clients that can be told, then close on those that are left."""
    count = sum(len(site.connections) for site in sites)
    for last_words in (True, False):
        for connection in [connection for site in sites for connection in site.connections]:
            _guarded(connection.expire if last_words else connection.abort)
        for _ in range(20):  # connection_lost comes a turn later
            if not any(site.connections for site in sites):
                break
            await asyncio.sleep(_POLL_SECONDS)
    return count


def _guarded(deed: Callable[..., None], *args: object) -> None:
    """Call a connection; its failure is logged and is not the others' failure."""
    try:
        deed(*args)
    except Exception:
        log.exception("%s failed", getattr(deed, "__qualname__", deed))


async def run_until_signal(
    servers: Sequence[WireServer], grace_seconds: float, *, on_signal: Callable[[], None] | None = None
) -> int:
    """Serve until SIGTERM or SIGINT, then drain all servers at once. Returns the exit code of the process.

    `on_signal` is called first, for a program to stop being ready before it stops accepting.

    0 after a clean drain, 1 if connections had to be cut when the grace was over. A second signal cuts everything and
    gives 128 plus its number.
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
    """SIGTERM and SIGINT as a sequence."""

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
        """Give the signals back, but not while a copy of the last one may still be on its way: it would kill."""
        self._loop.call_later(max(0.0, self._last + SAME_SIGNAL_SECONDS - self._loop.time()), self._give_back)

    def _give_back(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
