# SPDX-License-Identifier: Apache-2.0
"""Protocol negotiation: detects whether a new connection uses HTTP/1.1 or HTTP/2 and starts that protocol.

TLS clients choose through ALPN, others by their first bytes (RFC 9113 section 3.3, "prior knowledge").
"""

from __future__ import annotations

import asyncio
from typing import cast

from headrace.net.http1.connection import Http1Connection
from headrace.net.http2.connection import Http2Connection
from headrace.net.site import Site

_PREFACE_START = b"PRI * HTTP/2.0\r\n"


class NegotiatingProtocol(asyncio.Protocol):
    """The protocol of a connection from accept to its first bytes. Implements `site.Connection`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._transport: asyncio.Transport | None = None
        self._first = b""
        self._since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection; with TLS, ALPN has chosen the protocol already."""
        self._transport = cast("asyncio.Transport", transport)
        self._since = self._site.now
        self._site.connections.add(self)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            self._start_protocol(tls.selected_alpn_protocol() == "h2")

    def data_received(self, data: bytes) -> None:
        """Read the first bytes: HTTP/1.1 as soon as they differ from the HTTP/2 preface."""
        self._first += data
        start = self._first[: len(_PREFACE_START)]
        if start == _PREFACE_START:
            self._start_protocol(True)
        elif not _PREFACE_START.startswith(start):
            self._start_protocol(False)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection: the client closed it without a request."""
        self._site.connections.discard(self)
        self._transport = None

    def drain(self) -> None:
        """Leave it to `sweep` to close the connection, unless its first request arrives before."""

    def sweep(self, now: float) -> None:
        """Close when draining or after the header timeout."""
        waited = now - self._since
        if self._transport is not None and (self._site.draining or waited > self._site.limits.header_seconds):
            self._transport.close()

    def expire(self) -> None:
        """Close at once."""
        self.abort()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _start_protocol(self, http2: bool) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        site = self._site
        site.connections.discard(self)
        protocol: Http2Connection | Http1Connection = Http2Connection(site) if http2 else Http1Connection(site)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if site.draining:
            protocol.drain()
        first, self._first = self._first, b""
        feed(protocol, first)


def feed(protocol: asyncio.BaseProtocol, data: bytes) -> None:
    """Pass bytes that another protocol received to `protocol`, as the event loop would."""
    if isinstance(protocol, asyncio.Protocol):
        protocol.data_received(data)
        return
    if not isinstance(protocol, asyncio.BufferedProtocol):
        raise TypeError("a protocol reads by data_received or by get_buffer")
    view = memoryview(data)
    while view:
        buffer = memoryview(protocol.get_buffer(len(view)))
        size = min(len(view), len(buffer))
        buffer[:size] = view[:size]
        protocol.buffer_updated(size)
        view = view[size:]
