# SPDX-License-Identifier: Apache-2.0
"""Finds out whether a new connection speaks HTTP/1.1 or HTTP/2, and hands it to that protocol.

TLS clients say so through ALPN; others by their first bytes (RFC 9113 section 3.3, "prior knowledge").
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from headrace.net.http1.protocol import Http1Protocol
from headrace.net.http2.connection import Http2Connection

if TYPE_CHECKING:
    from headrace.net.site import Site

_PREFACE_START = b"PRI * HTTP/2.0\r\n"


class NegotiatingProtocol(asyncio.Protocol):
    """Lives from the accept to the first few bytes."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._transport: asyncio.Transport | None = None
        self._first = b""
        self._since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is there; with TLS the choice has been made already."""
        self._transport = cast("asyncio.Transport", transport)
        self._since = self._site.now
        self._site.connections.add(self)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            self._hand_over(tls.selected_alpn_protocol() == "h2")

    def data_received(self, data: bytes) -> None:
        """The first bytes: as soon as they can not be the preface of HTTP/2, they are HTTP/1.1."""
        self._first += data
        start = self._first[: len(_PREFACE_START)]
        if start == _PREFACE_START:
            self._hand_over(True)
        elif not _PREFACE_START.startswith(start):
            self._hand_over(False)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left without a word."""
        self._site.connections.discard(self)
        self._transport = None

    def drain(self) -> None:
        """See `site.Connection`: `sweep` closes it, unless its first request comes before."""

    def sweep(self, now: float) -> None:
        """See `site.Connection`."""
        waited = now - self._since
        if self._transport is not None and (self._site.draining or waited > self._site.limits.header_seconds):
            self._transport.close()

    def expire(self) -> None:
        """See `site.Connection`."""
        self.abort()

    def abort(self) -> None:
        """See `site.Connection`."""
        if self._transport is not None:
            self._transport.abort()

    def _hand_over(self, http2: bool) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        site = self._site
        site.connections.discard(self)
        protocol: Http2Connection | Http1Protocol = Http2Connection(site) if http2 else Http1Protocol(site)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if site.draining:
            protocol.drain()
        first, self._first = self._first, b""
        feed(protocol, first)


def feed(protocol: asyncio.BaseProtocol, data: bytes) -> None:
    """Give bytes that were received elsewhere to a protocol, as the event loop would."""
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
