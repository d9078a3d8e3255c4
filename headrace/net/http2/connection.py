# SPDX-License-Identifier: Apache-2.0
"""One HTTP/2 connection: handles header blocks, opens and closes streams, enforces timeouts, drains.

Made by `negotiation` for each connection. It does not know what a stream is for: `site.services` opens gRPC calls, and
every other request becomes an `Http2Exchange`. Numbers in parentheses are sections of RFC 9113.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from headrace.net.http2 import frames
from headrace.net.http2.exchange import Http2Exchange
from headrace.net.http2.frames import STREAM_MASK, ErrorCode, Http2ConnectionError, Setting, StreamError, frame
from headrace.net.http2.headers import HeaderReader
from headrace.net.http2.reader import OWN_FRAME_BYTES, FrameReader
from headrace.net.http2.stream import Stream, StreamConnection
from headrace.net.site import LINGER_SECONDS, Site, sweep_closing

log = logging.getLogger("headrace.wire")

_DRAIN_PING = b"headrace"
_DRAIN_SECONDS = 1.0
"""How long the final GOAWAY waits for the acknowledgement of our PING."""


class Http2Connection(StreamConnection, asyncio.BufferedProtocol):
    """A server's end of an HTTP/2 connection. Implements `site.Connection`."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        limits = site.limits
        self._headers = HeaderReader(limits)
        self._services = site.services
        self._reader = FrameReader(self)
        self._receive = site.receive_buffer
        self._carry = b""
        self._carry_since = 0.0
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
        """Start the connection: send our SETTINGS."""
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
        """Return where to receive: behind the unfinished frame of the last read, if there is one."""
        carried = len(self._carry)
        if carried:
            self._receive[:carried] = self._carry
            return self._receive[carried:]
        return self._receive

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the bytes received into `get_buffer`."""
        end = len(self._carry) + nbytes
        if self._closing_at is not None:
            self._carry = b""
            return
        try:
            position = self._reader.read(self._receive, end)
        except Http2ConnectionError as fault:
            self._fail(fault)
            return
        if position < end:
            if position or not self._carry:
                self._carry_since = self.site.now
            self._carry = bytes(self._receive[position:end])
        else:
            self._carry = b""

    def eof_received(self) -> bool:
        """Close: HTTP/2 has no half-closed connections."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """End all streams: the socket is closed."""
        self.site.connections.discard(self)
        self._transport = self._out = None
        self._end_streams(ErrorCode.CANCEL)

    # Called by the server.

    def drain(self) -> None:
        """Send a first GOAWAY that allows all streams; the final one follows when the client has seen it (6.8)."""
        if self._draining or self._closing_at is not None:
            return
        self._draining = True
        self.write(
            frames.goaway_frame(STREAM_MASK, ErrorCode.NO_ERROR, b"draining") + frame(frames.PING, 0, 0, _DRAIN_PING)
        )
        self._drain_since = self.site.now

    def sweep(self, now: float) -> None:
        """Enforce the timeouts of the connection and its streams."""
        limits = self.site.limits
        if self._closing_at is not None:
            if self._transport is not None:
                self._closing_at = sweep_closing(self, self._transport, self._closing_at, now)
        elif self.write_paused:
            self.sweep_unread(now)
        elif (self._reader.in_head and now - self._head_since > limits.header_seconds) or (
            self._carry and now - self._carry_since > limits.header_seconds
        ):
            self._fail(Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "a header block or the preface never ended"))
        elif self._draining and self._last_allowed is None and now - self._drain_since >= _DRAIN_SECONDS:
            self._send_final_goaway()
        elif self.streams:
            self._sweep_streams(now)
        elif now - self._idle_since > limits.idle_seconds and not self._reader.in_head:
            self._send_goaway(ErrorCode.NO_ERROR, "idle")
            self.close()

    def expire(self) -> None:
        """End all streams at the drain deadline, then close."""
        for stream in list(self.streams.values()):
            _notify(stream, stream.on_expire)
        if self._last_allowed is None:
            self._send_final_goaway()
        self.close()

    def close(self) -> None:
        """Close after what was written; keep reading for a moment so that a TCP reset does not overtake it."""
        transport = self._transport
        if transport is None or self._closing_at is not None:
            return
        self._out = None
        now = self.site.now
        self._write_stall.start(now)
        self._closing_at = now + LINGER_SECONDS
        if transport.can_write_eof():
            transport.write_eof()
        else:
            if self._idle_since == now:
                # TLS does not say what is still unsent: a client may still be reading its last response.
                self._closing_at = now + self.site.limits.write_idle_seconds
            transport.close()

    # Called by streams.

    def closed_locally(self, stream: Stream) -> None:
        """Close a stream on which everything has been sent."""
        if stream.remote_closed:
            self._drop(stream)
            self.flood_limits.resets.put_back()
        else:
            # Answered before the request was complete: nothing will read the rest (8.1).
            self.reset_stream(stream, ErrorCode.NO_ERROR)

    def reset_stream(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream at once."""
        if self.streams.get(stream.id) is stream:
            stream.release()
            self._send_reset(stream.id, code)
            self._drop(stream)

    def fail_stream(self, stream: Stream, fault: StreamError) -> None:
        """Reset a stream on which the client broke the protocol."""
        self.flood_limits.resets.take(self.site.now)
        log.info("stream reset: %s", fault.text, extra={"peer": self.peer, "stream": stream.id})
        if self.streams.get(stream.id) is stream:
            self.reset_stream(stream, fault.code)
            _notify(stream, stream.on_reset, fault.code)

    # Called by the frame reader.

    def headers(self, stream_id: int, block: bytes, ends_stream: int) -> None:
        """Handle a complete header block: a new request, or the trailers of an open one."""
        if stream_id <= self.highest_stream:
            open_stream = self.streams.get(stream_id)
            if open_stream is not None:
                self._trailers(open_stream, block, ends_stream)
                return
            self._late_headers(stream_id, block)
            return
        if not stream_id & 1:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "a client opens streams with odd numbers")
        self.highest_stream = stream_id
        if self.write_paused:
            self.count_unread()
        try:
            head = self._headers.request(block)
        except StreamError as fault:
            self._refuse_stream(stream_id, fault)
            return
        if self._last_allowed is not None and stream_id > self._last_allowed:
            return
        if len(self.streams) >= self.site.limits.concurrent_streams:
            self._refuse_stream(stream_id, StreamError(ErrorCode.REFUSED_STREAM, "too many concurrent streams"))
            return
        if ends_stream and head.content_length:
            self._refuse_stream(stream_id, StreamError(ErrorCode.PROTOCOL_ERROR, "a content-length and no body"))
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

    def header_block_started(self) -> None:
        """Start the timeout of a header block that arrives in several frames."""
        self._head_since = self.site.now

    def was_reset_by_us(self, stream_id: int) -> bool:
        """Return whether the client may still send on a closed stream because it has not read our reset yet."""
        return stream_id in self._reset_by_us or (self._last_allowed is not None and stream_id > self._last_allowed)

    def reset_by_peer(self, stream: Stream, code: int) -> None:
        """Handle RST_STREAM."""
        self.flood_limits.resets.take(self.site.now)
        stream.release()
        self._drop(stream)
        _notify(stream, stream.on_reset, code)

    def ping_answered(self, payload: bytes) -> None:
        """Handle the acknowledgement of a PING: the client has seen our first GOAWAY."""
        if payload == _DRAIN_PING and self._draining and self._last_allowed is None:
            self._send_final_goaway()

    # Internal.

    def _trailers(self, stream: Stream, block: bytes, ends_stream: int) -> None:
        if stream.remote_closed:
            self._headers.skip(block)
            self.fail_stream(stream, StreamError(ErrorCode.STREAM_CLOSED, "HEADERS after END_STREAM"))
            return
        try:
            fields = self._headers.trailers(block)
            if not ends_stream:
                raise StreamError(ErrorCode.PROTOCOL_ERROR, "trailers without END_STREAM")
            stream.on_trailers(fields)
            self.end_of_stream(stream)
        except StreamError as fault:
            self.fail_stream(stream, fault)

    def _late_headers(self, stream_id: int, block: bytes) -> None:
        """Decode the header block of a closed stream, for the HPACK table, and count it: it costs as much as any."""
        if not stream_id & 1:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "a client opens streams with odd numbers")
        self.flood_limits.empty_frames.take(self.site.now)
        self._headers.skip(block)
        if not self.was_reset_by_us(stream_id):
            raise Http2ConnectionError(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")

    def _refuse_stream(self, stream_id: int, fault: StreamError) -> None:
        self.flood_limits.resets.take(self.site.now)
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
        if stream.held_bytes:
            stream.hold(0)
        if stream.unconsumed:
            # Nothing will read these bytes, and the connection's other streams need the window.
            size, stream.unconsumed = stream.unconsumed, 0
            self.consume_connection(size)
        self._idle_since = self.site.now
        if self._last_allowed is not None and not self.streams:
            self.close()

    def _send_final_goaway(self) -> None:
        self._last_allowed = self.highest_stream
        self._send_goaway(ErrorCode.NO_ERROR, "draining")
        if not self.streams:
            self.close()

    def _fail(self, fault: Http2ConnectionError) -> None:
        log.info("connection closed: %s", fault.text, extra={"peer": self.peer, "code": fault.code.name})
        self._carry = b""
        self._send_goaway(fault.code, fault.text)
        self.close()
        self._end_streams(fault.code)

    def _send_goaway(self, code: ErrorCode, text: str) -> None:
        """Name the last stream we may have acted on; never a later one than before (6.8), so not one we ignored."""
        last = self.highest_stream if self._last_allowed is None else self._last_allowed
        self.write(frames.goaway_frame(last, code, text.encode()))

    def _end_streams(self, code: ErrorCode) -> None:
        streams = list(self.streams.values())
        self.streams.clear()
        self.blocked.clear()
        self.starved.clear()
        for stream in streams:
            stream.release()
            _notify(stream, stream.on_reset, code)

    def _sweep_streams(self, now: float) -> None:
        """End streams that the client stalls, and with the last of them the connection."""
        stalled = [stream for stream in self.streams.values() if stream.sweep(now)]
        for stream in stalled:
            log.info("stream stalled", extra={"peer": self.peer, "stream": stream.id})
            _notify(stream, stream.on_stall)
        if stalled and not self.streams:
            self._send_goaway(ErrorCode.NO_ERROR, "no progress")
            self.close()


def _notify(stream: Stream, callback: Callable[..., None], *arguments: object) -> None:
    """Notify a stream that it has ended; a failure of its handler must not keep the others from being notified."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("handler failed at the end of its stream", extra={"stream": stream.id})
