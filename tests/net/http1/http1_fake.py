# SPDX-License-Identifier: Apache-2.0
"""`Http1Connection` without a socket: a transport that keeps what is written, as strict as uvloop's about misuse."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from http1_site import Handlers, http1_site
from http1_wire import Answer, parse_answers

from headrace.core.limits import Limits
from headrace.net.http1.connection import Http1Connection
from headrace.net.negotiation import feed
from headrace.net.site import Site

READ_BYTES = 256 * 1024
"""uvloop reads no more at once."""


class FakeTransport(asyncio.Transport):
    """Writing after `write_eof` raises, as it does on uvloop; what is unsent stays until the test says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.unsent = 0
        self.reading = True
        self.ended = False
        self.closed = False
        self.aborted = False
        self.protocol = asyncio.BaseProtocol()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("192.0.2.1", 4242) if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._check_open()
        self.written += data

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self._check_open()
        for data in list_of_data:
            self.written += data

    def _check_open(self) -> None:
        if self.ended:
            raise RuntimeError("Cannot call write() after write_eof()")

    def write_eof(self) -> None:
        self.ended = True

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


class FakeWire:
    """A connection in memory. The clock stands still until `sweep` moves it."""

    def __init__(
        self, limits: Limits | None = None, site: Site | None = None, handlers: Handlers | None = None
    ) -> None:
        self.handlers = handlers or Handlers()
        self.site = site or http1_site(self.handlers, limits)
        self.transport = FakeTransport()
        self.protocol = Http1Connection(self.site)
        self.transport.set_protocol(self.protocol)
        self.protocol.connection_made(self.transport)

    def feed(self, *pieces: bytes) -> FakeWire:
        """Give bytes as the loop would: not while reading is paused, nor after the end."""
        for piece in pieces:
            if not self.transport.reading:
                raise AssertionError("reading is paused: a loop would not deliver this")
            view = memoryview(piece)
            while view and not self.transport.is_closing():
                reader = self.transport.protocol
                # A loop asks a buffered protocol for room and fills no more than that; then another may read on.
                size = min(len(view), READ_BYTES)
                if isinstance(reader, asyncio.BufferedProtocol):
                    size = min(size, len(memoryview(reader.get_buffer(size))))
                feed(reader, bytes(view[:size]))
                view = view[size:]
        return self

    # Calls and not attributes, which a type checker would believe to stay as they were.

    def reading(self) -> bool:
        return self.transport.reading

    def ended(self) -> bool:
        return self.transport.ended

    def closed(self) -> bool:
        return self.transport.closed

    def aborted(self) -> bool:
        return self.transport.aborted

    def answers(self) -> list[Answer]:
        return parse_answers(bytes(self.transport.written))

    def statuses(self) -> list[int]:
        return [answer.status for answer in self.answers()]

    def sweep(self, seconds_later: float = 0.0) -> None:
        self.site.tick(self.site.now + seconds_later)
        self.protocol.sweep(self.site.now)
        self.settle()

    def settle(self) -> None:
        """What the loop does a turn after `abort` or `close`."""
        if self.transport.is_closing():
            self.protocol.connection_lost(None)

    def eof(self) -> None:
        """The client half-closes."""
        if not self.protocol.eof_received():
            self.transport.close()
        self.settle()
