# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 connections to backends, and the pool of each backend.

The calls of many clients share a connection. Frames, flow control and flood limits are those of `net.http2`; this module
adds what a client does differently: it opens streams and reads responses.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from headrace.fleet.router.grpc.headers import ResponseHeaderReader, opening_blocks
from headrace.fleet.router.grpc.streams import MAX_STREAMS, BatchingConnection
from headrace.net.http2 import frames
from headrace.net.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADER,
    HEADER_BYTES,
    HEADERS,
    STREAM_MASK,
    ErrorCode,
    Http2ConnectionError,
    Setting,
    StreamError,
)
from headrace.net.http2.reader import OWN_FRAME_BYTES, ControlFrames, FrameReader

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.grpc.streams import CallStream, UpstreamStream
    from headrace.fleet.router.settings import GrpcProxySettings
    from headrace.net.http2.stream import Stream
    from headrace.net.site import Site

log = logging.getLogger("headrace.router")

_UPDATE_BYTES = 4 * 1024 * 1024
"""Bytes of the connection's window that are used before a WINDOW_UPDATE."""
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
"""TCP keep-alive detects a dead machine. Not PING frames: gRPC servers close connections of clients that send many."""
_END = END_HEADERS | END_STREAM
_unpack = HEADER.unpack_from


class GrpcConnectionPool:
    """The connections to one backend, and the calls that wait for one."""

    def __init__(
        self,
        backend: Backend,
        site: Site,
        settings: GrpcProxySettings,
        *,
        connect_seconds: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.backend = backend
        self.waiting: dict[CallStream, None] = {}
        """Waiting calls in order; a dictionary, because any of them may give up."""
        self._site = site
        self._settings = settings
        self._connect_seconds = connect_seconds
        self._tls = tls
        self._ready: list[GrpcConnection] = []
        self._attempts: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def connections(self) -> int:
        """Number of connections that take calls."""
        return len(self._ready)

    def pick(self) -> GrpcConnection | None:
        """Return the connection with the fewest calls; None if none has capacity."""
        best = None
        load = 1 << 30
        for connection in self._ready:
            if connection.load < load and connection.load < connection.max_streams:
                best = connection
                load = connection.load
        if best is not None and load >= self._settings.spread_calls:
            self._grow()
        return best

    def wait(self, call: CallStream) -> bool:
        """Call its `connected` or `connection_failed` later. Returns False if too many calls wait already."""
        if self._closed or len(self.waiting) >= self._settings.waiting_calls:
            return False
        self.waiting[call] = None
        self._grow()
        return True

    def serve_waiting(self, connection: GrpcConnection) -> None:
        """Send waiting calls, in order, on a connection that has capacity."""
        waiting = self.waiting
        while waiting and connection.load < connection.max_streams and not connection.retired:
            call = next(iter(waiting))
            del waiting[call]
            call.connected(connection)

    def stop_waiting(self, call: CallStream) -> None:
        """Remove a call that gave up."""
        self.waiting.pop(call, None)

    def remove(self, connection: GrpcConnection) -> None:
        """Remove a connection that takes no more calls."""
        if connection in self._ready:
            self._ready.remove(connection)
            if self.waiting:
                self._grow()

    def close(self) -> None:
        """Close everything."""
        self._closed = True
        for attempt in self._attempts:
            attempt.cancel()
        for connection in list(self._ready):
            connection.close()
        self._refuse_waiting("the router is shutting down")

    def _grow(self) -> None:
        """Open a connection, unless there are enough or one is being opened."""
        if not self._attempts and len(self._ready) < self._settings.connections and not self._closed:
            attempt = asyncio.get_running_loop().create_task(self._connect())
            self._attempts.add(attempt)
            attempt.add_done_callback(self._attempts.discard)

    async def _connect(self) -> None:
        address = self.backend.address
        protocol: GrpcConnection | None = None
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, protocol = await asyncio.get_running_loop().create_connection(
                    partial(GrpcConnection, self._site, self),
                    address.grpc_host,
                    address.grpc_port,
                    ssl=self._tls,
                    server_hostname=address.grpc_host if self._tls is not None else None,
                )
                await protocol.ready
        except (OSError, TimeoutError) as error:
            if protocol is not None:
                protocol.abort()
            self._failed(_reason(error, self._connect_seconds))
            return
        except Exception:
            log.exception("Cannot connect for gRPC", extra={"backend": self.backend.name})
            self._failed("it cannot be reached")
            return
        if protocol.retired or self._closed:
            # It was closed as soon as it was opened.
            protocol.close()
            self._failed("the backend closes its connections")
            return
        self._ready.append(protocol)
        self.serve_waiting(protocol)
        self._attempts.clear()
        if self.waiting:
            self._grow()

    def _failed(self, text: str) -> None:
        log.info("Cannot connect for gRPC: %s", text, extra={"backend": self.backend.name})
        self._attempts.clear()
        if not self._ready:
            self._refuse_waiting(text)

    def _refuse_waiting(self, text: str) -> None:
        waiting, self.waiting = self.waiting, {}
        for call in waiting:
            call.connection_failed(text)


def _reason(error: Exception, seconds: float) -> str:
    """Return why there is no connection, without the text of the system."""
    if isinstance(error, TimeoutError):
        return f"no connection within {seconds:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "its certificate is not signed by a trusted CA"
    if isinstance(error, ssl.SSLError):
        return "the TLS handshake failed"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    # `GrpcConnection` raises ConnectionError with its own text; other errors have the system's, which is for the log only.
    return str(error) if type(error) is ConnectionError else "it cannot be reached"


class GrpcConnection(BatchingConnection):
    """One HTTP/2 connection to a backend. The pool reads `load`, `max_streams` and `retired`."""

    def __init__(self, site: Site, pool: GrpcConnectionPool) -> None:
        super().__init__(site)
        self._pool = pool
        self._reader = UpstreamReader(self)
        self._headers = self._response_headers = ResponseHeaderReader(site.limits)
        self.ready: asyncio.Future[None] = self._loop.create_future()
        """Done when the backend has sent its SETTINGS: from then on it takes calls."""
        self.update_threshold = min(self.update_threshold, _UPDATE_BYTES)
        self.retired = False
        """Whether it takes no more calls, and closes after the last."""
        self._reason = ""
        address = pool.backend.address
        self.scheme, self.scheme_and_host = opening_blocks(address.scheme, address.grpc_host, address.grpc_port)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface and our settings."""
        self._transport = self._out = cast("asyncio.Transport", transport)
        self._idle_since = self._head_since = self.site.now
        self.site.connections.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            for option in _KEEPALIVE:
                sock.setsockopt(*option)
        settings = {
            # Without a dynamic table, a block always means the same and is decoded once.
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
            self._reason = "the backend's TLS port does not offer HTTP/2"
            transport.abort()  # type: ignore[attr-defined]

    def buffer_updated(self, nbytes: int) -> None:
        """Read frames, then write the responses to them."""
        try:
            super().buffer_updated(nbytes)
        finally:
            self.flush_responses()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all streams."""
        self._reason = self._reason or "the backend closed the connection"
        super().connection_lost(exc)
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(self._reason))

    # Called by the pool.

    def close(self) -> None:
        """Take no more calls, and close after pending writes."""
        self.retired = True
        self._pool.remove(self)
        self._write_queue()
        super().close()

    # Called by streams.

    def unsent_cancelled(self) -> None:
        """Free the capacity of a call that was cancelled before its head was written."""
        self.load -= 1
        self._capacity_freed()

    def closed_locally(self, stream: Stream) -> None:
        """Do nothing: the response is still to come."""

    # Called by the reader and its control frames.

    def headers(self, stream_id: int, block: bytes, ends_stream: int) -> None:
        """Handle a whole header block: the head of a response, or its trailers."""
        stream = cast("UpstreamStream | None", self.streams.get(stream_id))
        if stream is None:
            if self.is_idle(stream_id):
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream that we did not open")
            self._response_headers.skip(block)
            return
        try:
            if stream.response_started:
                tail = self._response_headers.response_trailers(block)
                if not ends_stream:
                    raise StreamError(ErrorCode.PROTOCOL_ERROR, "trailers without END_STREAM")
                self._finish(stream)
                stream.call.response_trailers(stream, tail)
                return
            head = self._response_headers.response_head(block)
            if head.status < 200:
                # Interim responses such as 100: gRPC does not use them.
                self.flood_limits.empty_frames.take(self.site.now)
                if ends_stream:
                    raise StreamError(ErrorCode.PROTOCOL_ERROR, "a response that ends before it starts")
                return
            stream.response_started = True
            if ends_stream:
                self._finish(stream)
            stream.call.response_head(stream, head, bool(ends_stream))
        except StreamError as fault:
            self.fail_stream(stream, fault)

    def whole_response(self, number: int, head_block: bytes, data: memoryview, tail_block: bytes) -> bool:
        """Handle a response that arrived whole. Returns False, and does nothing, if it needs the general path."""
        stream = cast("UpstreamStream | None", self.streams.get(number))
        response = self._response_headers.known(head_block, tail_block)
        size = len(data)
        if (
            stream is None
            or response is None
            or stream.response_started
            or not stream.local_closed
            or size > stream.receive_window
            or size > self.receive_window
        ):
            return False
        self.receive_window -= size
        self.consumed += size
        if self.consumed >= self.update_threshold:
            self.send_window_update()
        stream.response_started = stream.remote_closed = True
        self._drop(stream)
        stream.call.response_whole(stream, response[0], bytes(data), response[1])
        return True

    def end_of_stream(self, stream: Stream) -> None:
        """Handle the end of a response without trailers."""
        if not cast("UpstreamStream", stream).response_started:
            raise StreamError(ErrorCode.PROTOCOL_ERROR, "DATA before HEADERS")
        self._finish(stream)
        stream.on_end()

    def fail_stream(self, stream: Stream, fault: StreamError) -> None:
        """Reset a stream on which the backend violated HTTP/2."""
        self.flood_limits.resets.take(self.site.now)
        log.info("A backend violated HTTP/2: %s", fault.text, extra={"backend": self._pool.backend.name})
        if self.streams.get(stream.id) is stream:
            self.reset_stream(stream, fault.code)
            _notify(cast("UpstreamStream", stream).on_fault, fault.text)

    def reset_by_peer(self, stream: Stream, code: int) -> None:
        """Handle a reset by the backend."""
        stream.release()
        self._drop(stream)
        _notify(stream.on_reset, code)

    def was_reset_by_us(self, stream_id: int) -> bool:
        """Return True: any closed stream may still get frames that the backend sent before it knew."""
        return True

    def set_max_streams(self, limit: int) -> None:
        """Apply the backend's limit of concurrent streams."""
        self.max_streams = min(limit, MAX_STREAMS)

    def settings_changed(self) -> None:
        """Apply the backend's SETTINGS; after the first, the connection is ready."""
        super().settings_changed()
        if not self.ready.done():
            self.ready.set_result(None)
        else:
            self._capacity_freed()

    def going_away(self, last: int) -> None:
        """Handle GOAWAY: the backend takes no more streams and has not processed those above `last`, which are retried."""
        self.retired = True
        self._pool.remove(self)
        refused = [stream for number, stream in self.streams.items() if number > last]
        for stream in refused:
            stream.release()
            self._drop(stream)
        unsent, self._unsent = self._unsent, []
        for waiting in unsent:
            if waiting.unsent:
                waiting.release()
                self.load -= 1
                refused.append(waiting)
        for stream in refused:
            _notify(cast("UpstreamStream", stream).on_refused)
        if not self.load:
            self.close()

    # Private.

    def _finish(self, stream: Stream) -> None:
        stream.remote_closed = True
        if stream.local_closed:
            self._drop(stream)
        else:
            # The response came before the whole request was sent: the backend will not read the rest.
            self.reset_stream(stream, ErrorCode.CANCEL)

    def _drop(self, stream: Stream) -> None:
        super()._drop(stream)
        self.load -= 1
        if self.retired or self._pool.waiting:
            self._capacity_freed()

    def _capacity_freed(self) -> None:
        if self.retired:
            if not self.load:
                self.close()
        elif self._pool.waiting:
            self._pool.serve_waiting(self)

    def _fail(self, fault: Http2ConnectionError) -> None:
        self._reason = f"the backend violated HTTP/2: {fault.text}"
        log.warning("%s violated HTTP/2: %s", self._pool.backend.name, fault.text)
        super()._fail(fault)
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(self._reason))

    def _send_goaway(self, code: ErrorCode, text: str) -> None:
        # A server opens no streams, so there is none that we could have processed.
        self.write(frames.goaway_frame(0, code, text.encode()))

    def _end_streams(self, code: ErrorCode) -> None:
        self.retired = True
        self._pool.remove(self)
        lost = cast("list[UpstreamStream]", list(self.streams.values()))
        unsent, self._unsent = self._unsent, []
        self.streams.clear()
        self.blocked.clear()
        self.starved.clear()
        self.load = 0
        for stream in lost:
            stream.release()
            _notify(stream.on_lost, self._reason)
        for stream in unsent:
            if stream.unsent:
                stream.release()
                _notify(stream.on_refused)


def _notify(callback: Callable[..., None], *arguments: object) -> None:
    """Notify a stream that it has ended. An exception must not keep other streams from being notified."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("A call failed at its end.")


class UpstreamControl(ControlFrames):
    """Control frames of a backend: it limits streams, and may send GOAWAY."""

    __slots__ = ("_upstream",)

    def __init__(self, connection: GrpcConnection) -> None:
        super().__init__(connection)
        self._upstream = connection

    def handle_long(self, kind: int, stream_id: int) -> None:
        """Handle a frame that is too long to keep. A GOAWAY counts all the same."""
        super().handle_long(kind, stream_id)
        if kind == GOAWAY:
            self._upstream.going_away(STREAM_MASK)

    def _apply(self, key: int, value: int) -> None:
        if key == Setting.MAX_CONCURRENT_STREAMS:
            self._upstream.set_max_streams(value)
        elif key == Setting.ENABLE_PUSH and value:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "a server cannot enable push")
        else:
            super()._apply(key, value)

    def _goaway(self, flags: int, stream_id: int, payload: memoryview) -> None:
        super()._goaway(flags, stream_id, payload)
        self._upstream.going_away(int.from_bytes(payload[:4], "big") & STREAM_MASK)

    def _push(self, flags: int, stream_id: int, payload: memoryview) -> None:
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE, although push is disabled")


class UpstreamReader(FrameReader):
    """Reads the frames of a backend: there is no preface, and small responses take a fast path."""

    __slots__ = ("_upstream",)

    def __init__(self, connection: GrpcConnection) -> None:
        super().__init__(connection)
        self._upstream = connection
        self._control = UpstreamControl(connection)
        self._preface_read = True

    def read(self, buffer: memoryview, end: int) -> int:
        """Read small whole responses first, then the rest as `FrameReader.read` does."""
        position = 0
        if not (self._data_left or self._skip_left or self._block is not None) and self._control.settings_seen:
            position = self._read_whole_responses(buffer, end)
            if position == end:
                return end
        if not position:
            return super().read(buffer, end)
        return position + super().read(buffer[position:end], end - position)

    def _read_whole_responses(self, buffer: memoryview, end: int) -> int:
        """Read responses of three frames: HEADERS, DATA, HEADERS. Anything else is left to the general path."""
        take = self._upstream.whole_response
        position = 0
        while position + HEADER_BYTES < end:
            head = position + HEADER_BYTES
            high, low, kind, flags, number = _unpack(buffer, position)
            head_end = head + (high << 8 | low)
            data = head_end + HEADER_BYTES
            if kind != HEADERS or flags != END_HEADERS or data > end:
                break
            high, low, kind, flags, same = _unpack(buffer, head_end)
            data_end = data + (high << 8 | low)
            tail = data_end + HEADER_BYTES
            if kind != DATA or flags or same != number or data == data_end or tail > end:
                break
            high, low, kind, flags, same = _unpack(buffer, data_end)
            stop = tail + (high << 8 | low)
            if kind != HEADERS or flags != _END or same != number or stop > end:
                break
            if not take(number, bytes(buffer[head:head_end]), buffer[data:data_end], bytes(buffer[tail:stop])):
                break
            position = stop
        return position
