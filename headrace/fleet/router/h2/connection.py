# SPDX-License-Identifier: Apache-2.0
"""One HTTP/2 connection to a backend, over which the calls of many clients go.

Made by `pool.ConnectionPool`, which is told when it is ready, has room again, or takes no more calls. Frames, windows and
defences are those of `wire.http2`; here is what a client does otherwise: it opens streams and reads answers.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from headrace.fleet.router.h2.headers import AnswerReader, opening_blocks
from headrace.fleet.router.h2.reader import UpstreamReader
from headrace.fleet.router.h2.sending import MOST_STREAMS, UpstreamSending
from headrace.net.http2 import frames
from headrace.net.http2.frames import ConnectionFault, ErrorCode, Setting, StreamFault
from headrace.net.http2.reader import OWN_FRAME_BYTES

if TYPE_CHECKING:
    from headrace.fleet.router.h2.pool import ConnectionPool
    from headrace.fleet.router.h2.upstream import UpstreamStream
    from headrace.net.http2.stream import Stream
    from headrace.net.site import Site

log = logging.getLogger("headrace.router")

_HOLD_BYTES = 4 * 1024 * 1024
"""How much of the connection's window is used up before it is given back."""
_DEAD_PEER = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
"""A machine that vanished is noticed by the kernel. Not by PINGs: gRPC's servers close on a client that sends many."""


class UpstreamConnection(UpstreamSending):
    """See the module. The pool counts on `load`, `most` and `retired`; streams call the rest."""

    def __init__(self, site: Site, pool: ConnectionPool) -> None:
        super().__init__(site)
        self._pool = pool
        self._reader = UpstreamReader(self)
        self._headers = self._answers = AnswerReader(site.limits)
        self.ready: asyncio.Future[None] = self._loop.create_future()
        """Done when the backend has sent its SETTINGS: from then on it may be given calls."""
        self.hold_limit = min(self.hold_limit, _HOLD_BYTES)
        self.retired = False
        """Takes no more calls, and closes with the last."""
        self._why = ""
        address = pool.backend.address
        self.scheme, self.scheme_and_host = opening_blocks(address.scheme, address.grpc_host, address.grpc_port)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is there: the preface and our settings."""
        self._transport = self._out = cast("asyncio.Transport", transport)
        self._idle_since = self._head_since = self.site.now
        self.site.connections.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            for option in _DEAD_PEER:
                sock.setsockopt(*option)
        settings = {
            # Without a table, a block means the same each time, and is worked out once.
            Setting.HEADER_TABLE_SIZE: 0,
            Setting.ENABLE_PUSH: 0,
            Setting.INITIAL_WINDOW_SIZE: self.own_stream_window,
            Setting.MAX_FRAME_SIZE: OWN_FRAME_BYTES,
            Setting.MAX_HEADER_LIST_SIZE: self.site.limits.header_bytes,
        }
        greeting = frames.PREFACE + frames.settings_frame(settings)
        if self.receive_window > frames.DEFAULT_WINDOW:
            greeting += frames.window_update_frame(0, self.receive_window - frames.DEFAULT_WINDOW)
        self.write(greeting)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self._why = "the backend's TLS port does not offer HTTP/2"
            transport.abort()  # type: ignore[attr-defined]

    def buffer_updated(self, nbytes: int) -> None:
        """See `Http2Connection.buffer_updated`."""
        try:
            super().buffer_updated(nbytes)
        finally:
            self.write_answers()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `Http2Connection.connection_lost`."""
        self._why = self._why or "the backend closed the connection"
        super().connection_lost(exc)
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(self._why))

    # Called by the pool.

    def close(self) -> None:
        """See `Http2Connection.close`."""
        self.retired = True
        self._pool.lost(self)
        self._write_queue()
        super().close()

    # Called by streams.

    def not_begun(self) -> None:
        """A call ended before its head was written."""
        self.load -= 1
        self._room_again()

    def closed_locally(self, stream: Stream) -> None:
        """The request is sent; its answer is still to come."""

    # Called by the reader and its control frames.

    def headers(self, stream_id: int, block: bytes, ends_stream: int) -> None:
        """A whole header block: the head of an answer, or its trailers."""
        stream = cast("UpstreamStream | None", self.streams.get(stream_id))
        if stream is None:
            if self.is_idle(stream_id):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream that we did not open")
            self._answers.skip(block)
            return
        try:
            if stream.headed:
                tail = self._answers.answer_tail(block)
                if not ends_stream:
                    raise StreamFault(ErrorCode.PROTOCOL_ERROR, "trailers without END_STREAM")
                self._finish(stream)
                stream.call.answer_tail(stream, tail)
                return
            head = self._answers.answer_head(block)
            if head.status < 200:
                # 100 and its like are no answer yet, and gRPC has no use for them.
                self.guards.empty_frames.spend(self.site.now)
                if ends_stream:
                    raise StreamFault(ErrorCode.PROTOCOL_ERROR, "an answer that ends before it begins")
                return
            stream.headed = True
            if ends_stream:
                self._finish(stream)
            stream.call.answer_head(stream, head, bool(ends_stream))
        except StreamFault as fault:
            self.fail_stream(stream, fault)

    def whole_answer(self, number: int, head_block: bytes, data: memoryview, tail_block: bytes) -> bool:
        """An answer that came whole. False, and nothing done, if there is anything about it that wants a closer look."""
        stream = cast("UpstreamStream | None", self.streams.get(number))
        known = self._answers.known(head_block, tail_block)
        size = len(data)
        if (
            stream is None
            or known is None
            or stream.headed
            or not stream.local_closed
            or size > stream.receive_window
            or size > self.receive_window
        ):
            return False
        self.receive_window -= size
        self.held += size
        if self.held >= self.hold_limit:
            self.grant_held()
        stream.headed = stream.remote_closed = True
        self._drop(stream)
        stream.call.answer_whole(stream, known[0], bytes(data), known[1])
        return True

    def end_of_stream(self, stream: Stream) -> None:
        """The backend has ended an answer without trailers."""
        if not cast("UpstreamStream", stream).headed:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "DATA before HEADERS")
        self._finish(stream)
        stream.on_end()

    def fail_stream(self, stream: Stream, fault: StreamFault) -> None:
        """The backend broke a stream's rules."""
        self.guards.resets.spend(self.site.now)
        log.info("a backend broke a rule: %s", fault.text, extra={"backend": self._pool.backend.name})
        if self.streams.get(stream.id) is stream:
            self.reset_stream(stream, fault.code)
            _told(cast("UpstreamStream", stream).on_fault, fault.text)

    def reset_by_peer(self, stream: Stream, code: int) -> None:
        """The backend gave a stream up."""
        stream.forget()
        self._drop(stream)
        _told(stream.on_reset, code)

    def was_reset_by_us(self, stream_id: int) -> bool:
        """Any stream that is over may still get frames: the backend need not have read that it is."""
        return True

    def room_announced(self, most: int) -> None:
        """The backend says how many streams it takes at once."""
        self.most = min(most, MOST_STREAMS)

    def settings_changed(self) -> None:
        """See `SendingSide.settings_changed`."""
        super().settings_changed()
        if not self.ready.done():
            self.ready.set_result(None)
        else:
            self._room_again()

    def going_away(self, last: int) -> None:
        """The backend takes no more streams, and will not look at those above `last`: others may have them."""
        self.retired = True
        self._pool.lost(self)
        refused = [stream for number, stream in self.streams.items() if number > last]
        for stream in refused:
            stream.forget()
            self._drop(stream)
        unsent, self._unsent = self._unsent, []
        for waiting in unsent:
            if waiting.unsent:
                waiting.forget()
                self.load -= 1
                refused.append(waiting)
        for stream in refused:
            _told(cast("UpstreamStream", stream).on_refused)
        if not self.load:
            self.close()

    # Inside.

    def _finish(self, stream: Stream) -> None:
        stream.remote_closed = True
        if stream.local_closed:
            self._drop(stream)
        else:
            # Answered before the whole request was sent: nobody will read the rest.
            self.reset_stream(stream, ErrorCode.CANCEL)

    def _drop(self, stream: Stream) -> None:
        super()._drop(stream)
        self.load -= 1
        if self.retired or self._pool.waiting:
            self._room_again()

    def _room_again(self) -> None:
        if self.retired:
            if not self.load:
                self.close()
        elif self._pool.waiting:
            self._pool.serve_waiting(self)

    def _fail(self, fault: ConnectionFault) -> None:
        self._why = f"the backend broke HTTP/2: {fault.text}"
        log.warning("%s broke HTTP/2: %s", self._pool.backend.name, fault.text)
        super()._fail(fault)
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(self._why))

    def _say_goaway(self, code: ErrorCode, text: str) -> None:
        # A server opens no streams, so that there is none that we could have acted on.
        self.write(frames.goaway_frame(0, code, text.encode()))

    def _end_streams(self, code: ErrorCode) -> None:
        self.retired = True
        self._pool.lost(self)
        lost = cast("list[UpstreamStream]", list(self.streams.values()))
        unsent, self._unsent = self._unsent, []
        self.streams.clear()
        self.blocked.clear()
        self.load = 0
        for stream in lost:
            stream.forget()
            _told(stream.on_lost, self._why)
        for stream in unsent:
            if stream.unsent:
                stream.forget()
                _told(stream.on_refused)


def _told(deed: Callable[..., None], *arguments: object) -> None:
    """Tell a stream that it is over; if that fails, the others have to hear of theirs all the same."""
    try:
        deed(*arguments)
    except Exception:
        log.exception("a call failed at its end")
