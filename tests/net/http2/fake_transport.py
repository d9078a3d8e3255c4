# SPDX-License-Identifier: Apache-2.0
"""An HTTP/2 connection without a socket: bytes in, frames out, time by hand. For fuzzing, sweeps and drains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from hyperframe.frame import Frame
from raw_frames import PREFACE, settings

from headrace.core.limits import Limits
from headrace.net.http2.connection import Http2Connection
from headrace.net.negotiation import feed
from support.serving import EchoCalls, EchoHandlers, echo_site


class FakeTransport(asyncio.Transport):
    """Keeps what is written. As strict as uvloop's: writing after the end of writing is an error."""

    def __init__(self, *, tls: bool = False) -> None:
        super().__init__()
        self._tls = tls
        self.written = bytearray()
        self.unread = 0
        """What `get_write_buffer_size` tells: bytes the client has not read."""
        self.stuck = False
        """Whether the client reads nothing, so that `unread` grows with every write."""
        self.ended = False
        self.closed = False

    def write(self, data: Any) -> None:
        if self.ended:
            raise RuntimeError("Cannot call write() after write_eof()")
        if not self.closed:
            self.written += data
            if self.stuck:
                self.unread += len(data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for data in list_of_data:
            self.write(data)

    def can_write_eof(self) -> bool:
        return not self._tls

    def write_eof(self) -> None:
        if self._tls:
            raise NotImplementedError
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("192.0.2.1", 50000) if name == "peername" else default


class Http2Harness:
    """A connection on a `FakeTransport`, with a site of its own."""

    def __init__(self, limits: Limits | None = None, *, shake_hands: bool = True, tls: bool = False) -> None:
        self.handlers = EchoHandlers()
        self.site = echo_site(limits, self.handlers, EchoCalls())()
        self.site.date_block = b""
        self.transport = FakeTransport(tls=tls)
        self.connection = Http2Connection(self.site)
        self.connection.connection_made(self.transport)
        if shake_hands:
            self.feed(PREFACE + settings({}))
            self.frames()

    def feed(self, data: bytes) -> None:
        feed(self.connection, data)

    def frames(self) -> list[Frame]:
        """What has been written since the last look, as frames."""
        data = bytes(self.transport.written)
        self.transport.written.clear()
        results = []
        while data:
            frame, length = Frame.parse_frame_header(memoryview(data[:9]))
            assert len(data) >= 9 + length, "a torn frame"
            frame.parse_body(memoryview(data[9 : 9 + length]))
            results.append(frame)
            data = data[9 + length :]
        return results

    def sweep(self, now: float) -> None:
        self.site.now = now
        self.connection.sweep(now)

    @property
    def closing(self) -> bool:
        return self.transport.ended or self.transport.closed
