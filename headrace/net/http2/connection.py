# SPDX-License-Identifier: Apache-2.0
"""One HTTP/2 connection: reads frames, opens streams, keeps windows, drains.

Made by `wire.negotiation`. It knows which frame is allowed when (RFC 9113 sections 4 to 6) and nothing of what a stream
is for: `site.services` opens gRPC calls, everything else becomes an `Http2Exchange`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from headrace.net.http2 import frames
from headrace.net.http2.exchange import Http2Exchange
from headrace.net.http2.frames import STREAM_MASK, ConnectionFault, ErrorCode, Setting, StreamFault, frame
from headrace.net.http2.guards import Guards
from headrace.net.http2.headers import HeaderReader
from headrace.net.http2.reader import OWN_FRAME_BYTES, FrameReader
from headrace.net.http2.sending import SendingSide
from headrace.net.http2.stream import Stream, grant_frame
from headrace.net.unread import LINGER_SECONDS, sweep_closing

if TYPE_CHECKING:
    from headrace.net.site import Site

log = logging.getLogger("headrace.wire")

_DRAIN_PING = b"headrace"
_DRAIN_SECONDS = 1.0
"""How long the last word waits for the answer to our PING."""


class Http2Connection(SendingSide, asyncio.BufferedProtocol):
    """See the module. Public methods are for streams and for the server (`site.Connection`)."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        limits = site.limits
        self.own_stream_window = _window(limits.stream_window_bytes)
        self._headers = HeaderReader(limits)
        self._services = site.services
        self._reader = FrameReader(self)
        self.guards = Guards(limits.concurrent_streams)
        self.receive_window = _window(limits.connection_window_bytes)
        self.highest_stream = 0
        self._receive = site.receive_buffer
        self._carry = b""
        self._carry_since = 0.0
        self.held = 0
        """Bytes taken but not yet granted to the client again."""
        self.hold_limit = self.receive_window // 2
        self.stream_hold_limit = self.own_stream_window // 2
        self._reset_by_us: dict[int, None] = {}
        self._resets_kept = max(1024, limits.concurrent_streams)
        """As many as may have had something in flight when we reset them."""
        self._last_allowed: int | None = None
        self._draining = False
        self._closing_at: float | None = None
        self._idle_since = 0.0
        self._head_since = 0.0
        self._drain_since = 0.0

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is there: announce our settings."""
        self._transport = self._out = cast("asyncio.Transport", transport)
        self._idle_since = self._head_since = self.site.now
        self.site.connections.add(self)
        limits = self.site.limits
        settings = {
            Setting.MAX_CONCURRENT_STREAMS: limits.concurrent_streams,
            Setting.INITIAL_WINDOW_SIZE: self.own_stream_window,
            Setting.MAX_FRAME_SIZE: OWN_FRAME_BYTES,
            Setting.MAX_HEADER_LIST_SIZE: limits.header_bytes,
        }
        greeting = frames.settings_frame(settings)
        if self.receive_window > frames.DEFAULT_WINDOW:
            greeting += frames.window_update_frame(0, self.receive_window - frames.DEFAULT_WINDOW)
        self.write(greeting)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes should go: behind the unfinished frame of the last read, if there is one."""
        carried = len(self._carry)
        if carried:
            self._receive[:carried] = self._carry
            return self._receive[carried:]
        return self._receive

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have arrived where `get_buffer` said."""
        end = len(self._carry) + nbytes
        if self._closing_at is not None:
            self._carry = b""
            return
        try:
            position = self._reader.read(self._receive, end)
        except ConnectionFault as fault:
            self._fail(fault)
            return
        if position < end:
            if position or not self._carry:
                self._carry_since = self.site.now
            self._carry = bytes(self._receive[position:end])
        else:
            self._carry = b""

    def eof_received(self) -> bool:
        """The client will send no more; HTTP/2 has no half-closed connections."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        self.site.connections.discard(self)
        self._transport = self._out = None
        self._end_streams(ErrorCode.CANCEL)

    # Called by the server.

    def drain(self) -> None:
        """See `site.Connection`. First a warning, then, when the client must have seen it, the last word (6.8)."""
        if self._draining or self._closing_at is not None:
            return
        self._draining = True
        self.write(
            frames.goaway_frame(STREAM_MASK, ErrorCode.NO_ERROR, b"draining") + frame(frames.PING, 0, 0, _DRAIN_PING)
        )
        self._drain_since = self.site.now

    def sweep(self, now: float) -> None:
        """See `site.Connection`."""
        limits = self.site.limits
        if self._closing_at is not None:
            if self._transport is not None:
                self._closing_at = sweep_closing(self, self._transport, self._closing_at, now)
        elif self.write_paused:
            self.sweep_unread(now)
        elif (self._reader.in_head and now - self._head_since > limits.header_seconds) or (
            self._carry and now - self._carry_since > limits.header_seconds
        ):
            self._fail(ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block or the preface never ended"))
        elif self._draining and self._last_allowed is None and now - self._drain_since >= _DRAIN_SECONDS:
            self._last_word()
        elif self.streams:
            self._sweep_streams(now)
        elif now - self._idle_since > limits.idle_seconds and not self._reader.in_head:
            self._say_goaway(ErrorCode.NO_ERROR, "idle")
            self.close()

    def expire(self) -> None:
        """See `site.Connection`."""
        for stream in list(self.streams.values()):
            _told(stream, stream.on_expire)
        if self._last_allowed is None:
            self._last_word()
        self.close()

    # Called by streams.

    def grant(self, stream: Stream, size: int) -> None:
        """Bytes of a stream have been taken: let the client send as many again, not too often."""
        self.grant_connection(size)
        if not stream.remote_closed:
            stream.held += size
            if stream.held >= self.own_stream_window // 2:
                self.write(grant_frame(stream))

    def closed_locally(self, stream: Stream) -> None:
        """We have sent all of a stream."""
        if stream.remote_closed:
            self._drop(stream)
            self.guards.resets.earn()
        else:
            # Answered before the client had finished: nobody will read the rest (8.1).
            self.reset_stream(stream, ErrorCode.NO_ERROR)

    def reset_stream(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream at once."""
        if self.streams.get(stream.id) is stream:
            stream.forget()
            self._send_reset(stream.id, code)
            self._drop(stream)

    def soon(self, callback: Callable[[], None]) -> None:
        """Call back from the loop, not from inside this call."""
        asyncio.get_running_loop().call_soon(callback)

    def close(self) -> None:
        """Close after what was written; keep reading for a moment so that a reset does not overtake it."""
        transport = self._transport
        if transport is None or self._closing_at is not None:
            return
        self._out = None
        now = self.site.now
        self._unread.begin(now)
        self._closing_at = now + LINGER_SECONDS
        if transport.can_write_eof():
            transport.write_eof()
        else:
            if self._idle_since == now:
                # TLS does not tell what it has left to send: a client may still be reading its last answer.
                self._closing_at = now + self.site.limits.write_idle_seconds
            transport.close()

    # Called by the reader.

    def grant_connection(self, size: int) -> None:
        """Let the client send as many bytes again on the connection, not too often."""
        self.held += size
        if self.held >= self.hold_limit:
            self.grant_held()

    def grant_held(self) -> None:
        """Give the connection's window back what was taken out of it."""
        held, self.held = self.held, 0
        self.receive_window += held
        self.write(frames.window_update_frame(0, held))

    def end_of_stream(self, stream: Stream) -> None:
        """The client has sent all of a stream."""
        expected = stream.head.content_length
        if expected is not None and expected != stream.received:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "content-length does not match the body")
        stream.remote_closed = True
        stream.on_end()

    def headers(self, stream_id: int, block: bytes, ends_stream: int) -> None:
        """A whole header block: a new request, or the trailers of one that is open."""
        if stream_id <= self.highest_stream:
            open_stream = self.streams.get(stream_id)
            if open_stream is not None:
                self._trailers(open_stream, block, ends_stream)
                return
            self._late_headers(stream_id, block)
            return
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client opens streams with odd numbers")
        self.highest_stream = stream_id
        if self.write_paused:
            self.count_unread()
        try:
            head = self._headers.request(block)
        except StreamFault as fault:
            self._refuse_stream(stream_id, fault)
            return
        if self._last_allowed is not None and stream_id > self._last_allowed:
            return
        if len(self.streams) >= self.site.limits.concurrent_streams:
            self._refuse_stream(stream_id, StreamFault(ErrorCode.REFUSED_STREAM, "too many concurrent streams"))
            return
        if ends_stream and head.content_length:
            self._refuse_stream(stream_id, StreamFault(ErrorCode.PROTOCOL_ERROR, "a content-length and no body"))
            return
        services = self._services
        call = services.open(self, stream_id, head) if services is not None else None
        stream: Stream = call if call is not None else Http2Exchange(self, stream_id, head)
        self.streams[stream_id] = stream
        if ends_stream:
            stream.remote_closed = True
        stream.on_open(bool(ends_stream))
        if ends_stream:
            self.guarded(stream, self.end_of_stream, stream)

    def guarded(self, stream: Stream, deed: Callable[..., None], *arguments: object) -> None:
        """Do something for a stream; a fault of the client's on it ends the stream, not the connection."""
        try:
            deed(*arguments)
        except StreamFault as fault:
            self.fail_stream(stream, fault)

    def fail_stream(self, stream: Stream, fault: StreamFault) -> None:
        """The client broke a stream's rules."""
        self.guards.resets.spend(self.site.now)
        log.info("stream reset: %s", fault.text, extra={"peer": self.peer, "stream": stream.id})
        if self.streams.get(stream.id) is stream:
            self.reset_stream(stream, fault.code)
            _told(stream, stream.on_reset, fault.code)

    def is_idle(self, stream_id: int) -> bool:
        """Whether a stream has never been opened."""
        return stream_id > self.highest_stream or not stream_id & 1

    def was_reset_by_us(self, stream_id: int) -> bool:
        """Whether the client may still be sending on a closed stream because it has not read our reset yet."""
        return stream_id in self._reset_by_us or (self._last_allowed is not None and stream_id > self._last_allowed)

    def touch(self) -> None:
        """Start the clock of a header block."""
        self._head_since = self.site.now

    # Called by the control frames.

    def reset_by_peer(self, stream: Stream, code: int) -> None:
        """The client gave a stream up."""
        self.guards.resets.spend(self.site.now)
        stream.forget()
        self._drop(stream)
        _told(stream, stream.on_reset, code)

    def ping_answered(self, payload: bytes) -> None:
        """A PING came back."""
        if payload == _DRAIN_PING and self._draining and self._last_allowed is None:
            self._last_word()

    # Inside.

    def _trailers(self, stream: Stream, block: bytes, ends_stream: int) -> None:
        if stream.remote_closed:
            self._headers.skip(block)
            self.fail_stream(stream, StreamFault(ErrorCode.STREAM_CLOSED, "HEADERS after END_STREAM"))
            return
        try:
            fields = self._headers.trailers(block)
            if not ends_stream:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "trailers without END_STREAM")
            stream.on_trailers(fields)
            self.end_of_stream(stream)
        except StreamFault as fault:
            self.fail_stream(stream, fault)

    def _late_headers(self, stream_id: int, block: bytes) -> None:
        """A block for a stream that is over: decoded for the table's sake, and counted, for it costs as much as any."""
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client opens streams with odd numbers")
        self.guards.empty_frames.spend(self.site.now)
        self._headers.skip(block)
        if not self.was_reset_by_us(stream_id):
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")

    def _refuse_stream(self, stream_id: int, fault: StreamFault) -> None:
        self.guards.resets.spend(self.site.now)
        log.info("stream refused: %s", fault.text, extra={"peer": self.peer, "stream": stream_id})
        self._send_reset(stream_id, fault.code)

    def _send_reset(self, stream_id: int, code: ErrorCode) -> None:
        self.write(frames.reset_frame(stream_id, code))
        self._reset_by_us[stream_id] = None
        if len(self._reset_by_us) > self._resets_kept:
            del self._reset_by_us[next(iter(self._reset_by_us))]

    def _drop(self, stream: Stream) -> None:
        del self.streams[stream.id]
        self.blocked.pop(stream.id, None)
        if stream.withheld:
            # Nobody will read these, and the connection's other streams need the room.
            size, stream.withheld = stream.withheld, 0
            self.grant_connection(size)
        self._idle_since = self.site.now
        if self._last_allowed is not None and not self.streams:
            self.close()

    def _last_word(self) -> None:
        self._last_allowed = self.highest_stream
        self._say_goaway(ErrorCode.NO_ERROR, "draining")
        if not self.streams:
            self.close()

    def _fail(self, fault: ConnectionFault) -> None:
        log.info("connection closed: %s", fault.text, extra={"peer": self.peer, "code": fault.code.name})
        self._carry = b""
        self._say_goaway(fault.code, fault.text)
        self.close()
        self._end_streams(fault.code)

    def _say_goaway(self, code: ErrorCode, text: str) -> None:
        """Name the last stream we may have acted on; never a later one than before (6.8), so not one we ignored."""
        last = self.highest_stream if self._last_allowed is None else self._last_allowed
        self.write(frames.goaway_frame(last, code, text.encode()))

    def _end_streams(self, code: ErrorCode) -> None:
        streams = list(self.streams.values())
        self.streams.clear()
        self.blocked.clear()
        for stream in streams:
            stream.forget()
            _told(stream, stream.on_reset, code)

    def _sweep_streams(self, now: float) -> None:
        """Give up streams that the client lets stand still, and with the last of them the connection."""
        stalled = [stream for stream in self.streams.values() if stream.sweep(now)]
        for stream in stalled:
            log.info("a stream stood still", extra={"peer": self.peer, "stream": stream.id})
            _told(stream, stream.on_stall)
        if stalled and not self.streams:
            self._say_goaway(ErrorCode.NO_ERROR, "nothing moves")
            self.close()


def _window(size: int) -> int:
    """A window that can be announced: a client may use the default one before it has read our SETTINGS (6.9.3)."""
    return min(max(size, frames.DEFAULT_WINDOW), frames.MAX_WINDOW)


def _told(stream: Stream, deed: Callable[..., None], *arguments: object) -> None:
    """Tell a stream that it is over. If its handler fails then, the others have to hear of their end all the same."""
    try:
        deed(*arguments)
    except Exception:
        log.exception("a handler failed at the end of its stream", extra={"stream": stream.id})
