# SPDX-License-Identifier: Apache-2.0
"""The two streams of a proxied gRPC call, and the batching of what they write.

`CallStream` is the client's stream: it sends the response to the client as it arrives. `UpstreamStream` is one attempt, on a
connection to a backend. Each write is a system call, so `BatchingConnection` joins what one turn of the loop produces for a
backend, and what one read from a backend produces for one client.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.fleet.router.backend import Outcome
from headrace.net.grpc.call import HEAD_BLOCK
from headrace.net.grpc.status import Status
from headrace.net.http2.connection import Http2Connection
from headrace.net.http2.frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADERS,
    ErrorCode,
)
from headrace.net.http2.stream import Stream, StreamConnection

if TYPE_CHECKING:
    from headrace.fleet.router.fairness import TokenUsage
    from headrace.fleet.router.grpc.headers import ProxiedCallPlan, ResponseBlock
    from headrace.net.http.heads import Buffer
    from headrace.net.site import Site

_pack = HEADER.pack


class UpstreamStream(Stream):
    """One attempt of a call, as a stream to its backend."""

    # Defaults on the class, as in `Stream`.
    id = 0
    """0 until the head is written: stream ids must be sent in order."""
    unsent = True
    response_started = False
    """Whether the head of the response has arrived."""
    _first_data = b""

    connection: BatchingConnection

    def __init__(self, connection: BatchingConnection, call: CallStream) -> None:
        self.connection = connection
        self.call = call
        self.receive_window = connection.own_stream_window

    # Called by the call.

    def send(self, piece: bytes) -> bool:
        """Send bytes of the request. Returns False if the caller should wait for `CallStream.upstream_writable`."""
        if self.unsent:
            if not self._first_data and len(piece) <= DEFAULT_FRAME_BYTES:
                # It may be the whole request: then head, data and end are one write.
                self._first_data = piece
                return True
            self.write_head(end=False)
        return self.send_data([piece])

    def finish(self) -> None:
        """End the request."""
        if self.unsent:
            self.write_head(end=True)
        else:
            self.send_data([], end=True)

    def abandon(self) -> None:
        """Cancel the attempt."""
        if self.local_closed and self.remote_closed:
            return
        if self.unsent:
            self.release()
            self.connection.unsent_cancelled()
        else:
            self.reset(ErrorCode.CANCEL)

    # Called by the connection.

    def write_head(self, *, end: bool) -> None:
        """Open the stream, with the first data of the request."""
        self.unsent = False
        if self.local_closed:
            return
        connection = self.connection
        call = self.call
        number = self.id = connection.assign_id(self)
        plan = call.plan
        block = call.head_block() if call.waited else plan.block
        block = (connection.scheme if plan.names_host else connection.scheme_and_host) + block
        piece, self._first_data = self._first_data, b""
        size, fields = len(piece), len(block)
        if not size:
            connection.write_headers(number, block, end)
            self.local_closed = end
        elif fields <= DEFAULT_FRAME_BYTES and connection.has_room(self, size):
            self.send_credit -= size
            connection.send_window -= size
            connection.write(
                _pack(fields >> 8, fields & 0xFF, HEADERS, END_HEADERS, number)
                + block
                + _pack(size >> 8, size & 0xFF, DATA, END_STREAM if end else 0, number)
                + piece
            )
            self.local_closed = end
        else:
            connection.write_headers(number, block, end=False)
            self.send_data([piece], end=end)

    def release(self) -> None:
        """Drop pending data."""
        super().release()
        self.unsent = False

    def on_data(self, data: memoryview) -> None:
        """Pass data of the response to the call."""
        if self.response_started:
            self.call.response_data(self, bytes(data))

    def on_end(self) -> None:
        """Pass the end of a response without trailers to the call."""
        self.call.response_end(self)

    def on_send_ready(self) -> None:
        """Tell the call that the backend takes more data."""
        self.call.upstream_writable(self)

    def on_reset(self, code: int) -> None:
        """Tell the call that the backend reset the stream."""
        self.call.attempt_reset(self, code)

    def on_fault(self, text: str) -> None:
        """Tell the call that the backend violated HTTP/2 on this stream."""
        self.call.attempt_lost(self, f"the backend violated HTTP/2: {text}")

    def on_lost(self, text: str) -> None:
        """Tell the call that the connection is lost."""
        self.call.attempt_lost(self, text)

    def on_refused(self) -> None:
        """Tell the call that the backend has not processed it and never will."""
        self.call.attempt_refused(self)

    def stall_timeout(self) -> float | None:
        """Return None: only the caller's deadline limits a call."""
        return None


class CallStream(Stream):
    """The client's stream of a call. The base of `proxy.ProxiedCall`, which fills in the abstract methods.

    A small response that arrived whole is written whole, together with others to the same client. For other responses the
    head is written with the data that follows it in the same read.
    """

    # Defaults on the class, as in `Stream`.
    finished = False
    """Whether the client has got its status, or has gone."""
    plan: ProxiedCallPlan
    usage: TokenUsage | None = None
    """The counter of what it sends and gets, with fairness between tenants."""
    waited = False
    """Whether the call has waited, so that its backend gets less than the caller's whole timeout."""
    whole_frames = b""
    """All frames of a response, for `BatchingConnection.write_whole_response`."""
    _upstream: UpstreamStream | None = None
    _started = False
    """Whether the head of a response has been written."""
    _head: bytes | None = None
    """The head of a response that is written with what follows it, or at the end of the read."""
    _piece = b""
    _outcome = Outcome.OK

    # Called by the stream to the backend, and by its connection.

    def response_head(self, upstream: UpstreamStream, response: ResponseBlock, ends: bool) -> None:
        """Take the head of the response; `ends`: nothing follows it."""
        if self.finished:
            return
        if ends:
            self._complete(response.outcome, response.grpc_status)
            self.send_headers(response.block, end=True)
            return
        self._drop_replay()
        self._head = response.block
        self._outcome = response.outcome
        upstream.connection.pending_responses.append(self)

    def response_data(self, upstream: UpstreamStream, piece: bytes) -> None:
        """Take data of the response."""
        if self.usage is not None:
            self.usage.add_output_bytes(len(piece))
        if self._head is not None:
            if not self._piece:
                self._piece = piece
                return
            self.flush_response()
        if not self.send_data([piece]):
            upstream.pause()

    def response_trailers(self, upstream: UpstreamStream, response: ResponseBlock) -> None:
        """Take the trailers, the end of the response."""
        if self.finished:
            return
        head, piece, tail = self._head, self._piece, response.block
        size = len(piece)
        if (
            head is not None
            and size
            and self.remote_closed
            and len(head) + size + len(tail) <= DEFAULT_FRAME_BYTES
            and self.connection.has_room(self, size)
        ):
            # The whole response in one read: it is written together with others to this client.
            self._complete(response.outcome, response.grpc_status)
            self.connection.send_window -= size
            self.local_closed = True
            self.whole_frames = _response_frames(self.id, head, piece, tail)
            upstream.connection.write_whole_response(self)
            return
        self.flush_response()
        self._complete(response.outcome, response.grpc_status)
        self.send_data([], trailers=tail)

    def response_whole(self, upstream: UpstreamStream, head: ResponseBlock, piece: bytes, tail: ResponseBlock) -> None:
        """Take a whole response."""
        if self.usage is not None:
            self.usage.add_output_bytes(len(piece))
        self._head = head.block
        self._piece = piece
        self.response_trailers(upstream, tail)

    def response_end(self, upstream: UpstreamStream) -> None:
        """Take the end of a response without trailers: it is not gRPC, but the client decides what that means."""
        if not self.finished:
            self.flush_response()
            self._complete(self._outcome, Status.UNKNOWN)
            self.send_data([], end=True)

    def flush_response(self) -> None:
        """Write what has arrived of the response."""
        head, self._head = self._head, None
        if head is None or self.finished:
            return
        self._started = True
        self.send_headers(head)
        piece, self._piece = self._piece, b""
        if piece and not self.send_data([piece]) and self._upstream is not None:
            self._upstream.pause()

    # Abstract.

    def connected(self, connection: BatchingConnection) -> None:
        """Send the request on a connection that is available."""
        raise NotImplementedError

    def connection_failed(self, text: str) -> None:
        """Handle that no connection could be made."""
        raise NotImplementedError

    def head_block(self) -> bytes:
        """Return the header block of a call that has waited."""
        raise NotImplementedError

    def upstream_writable(self, upstream: UpstreamStream) -> None:
        """Handle that the backend takes more data."""
        raise NotImplementedError

    def attempt_refused(self, upstream: UpstreamStream) -> None:
        """Handle that the backend has not processed the call."""
        raise NotImplementedError

    def attempt_reset(self, upstream: UpstreamStream, code: int) -> None:
        """Handle that the backend reset the stream."""
        raise NotImplementedError

    def attempt_lost(self, upstream: UpstreamStream, text: str) -> None:
        """Handle that the response is lost after the backend may have processed the call."""
        raise NotImplementedError

    def _complete(self, outcome: int, status: int) -> None:
        """Report the outcome of the attempt and end the call."""
        raise NotImplementedError

    def _drop_replay(self) -> None:
        """Drop the data that was kept to send the request again."""
        raise NotImplementedError

    # Private.

    def _send_status(self, block: bytes) -> None:
        """End the response with a status of the router."""
        if self._started:
            self.send_data([], trailers=block)
        else:
            self.send_headers(HEAD_BLOCK + block, end=True)


def _response_frames(number: int, head: bytes, piece: bytes, tail: bytes) -> bytes:
    """Return the frames of a whole response."""
    size, fields, last = len(piece), len(head), len(tail)
    return (
        _pack(fields >> 8, fields & 0xFF, HEADERS, END_HEADERS, number)
        + head
        + _pack(size >> 8, size & 0xFF, DATA, 0, number)
        + piece
        + _pack(last >> 8, last & 0xFF, HEADERS, END_HEADERS | END_STREAM, number)
        + tail
    )


MAX_STREAMS = 1000
"""Maximum calls on one connection, if the backend sets no lower limit."""
_LAST_STREAM = 1 << 30


class BatchingConnection(Http2Connection):
    """The sending side of a connection to a backend: opens streams and joins writes. The base of `GrpcConnection`."""

    scheme: bytes
    """Start of a header block that has the client's `:authority`."""
    scheme_and_host: bytes
    """Start of a header block with the backend's own `:authority`."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._loop = asyncio.get_running_loop()
        self.load = 0
        """Calls on this connection, including those whose head is not written yet."""
        self.max_streams = MAX_STREAMS
        self.pending_responses: list[CallStream] = []
        """Calls whose response started in the current read; what has arrived is written at its end, in one piece."""
        self._whole_responses: dict[StreamConnection, list[CallStream]] = {}
        """Calls whose whole response arrived in the current read, by the client's connection."""
        self._unsent: list[UpstreamStream] = []
        self._queue: list[Buffer] = []
        """Frames of the current turn of the loop."""
        self._flush_due = False
        self._next = 1

    # Called by calls and their streams.

    def open(self, stream: UpstreamStream) -> None:
        """Add a call. Its head is written with the data that follows in the same turn of the loop, or at the turn's end."""
        self.load += 1
        self._unsent.append(stream)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def write(self, data: Buffer) -> None:
        """Queue a buffer; the queue is written at the end of the turn."""
        self._queue.append(data)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def write_many(self, buffers: list[Buffer]) -> None:
        """Queue several buffers."""
        self._queue += buffers
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def write_whole_response(self, call: CallStream) -> None:
        """Queue `call.whole_frames` for the end of the read."""
        connection = call.connection
        calls = self._whole_responses.get(connection)
        if calls is None:
            self._whole_responses[connection] = [call]
        else:
            calls.append(call)

    def assign_id(self, stream: UpstreamStream) -> int:
        """Return the id of a stream whose head is about to be written."""
        number = self._next
        self._next = number + 2
        self.highest_stream = number
        self.streams[number] = stream
        if number > _LAST_STREAM:
            # The ids run out soon: take no more calls. The connection is closed when it is idle.
            self.max_streams = 0
        return number

    def unsent_cancelled(self) -> None:
        """Handle that a call was cancelled before its head was written."""
        raise NotImplementedError

    # Called by the connection.

    def flush_responses(self) -> None:
        """Write what the current read has produced for the clients."""
        if self._whole_responses:
            self._write_whole_responses()
        if self.pending_responses:
            pending, self.pending_responses = self.pending_responses, []
            for call in pending:
                call.flush_response()

    # Private.

    def _flush(self) -> None:
        """Write the queue, and the heads that no data has followed yet."""
        try:
            unsent, self._unsent = self._unsent, []
            for stream in unsent:
                if stream.unsent:
                    stream.write_head(end=False)
        finally:
            self._flush_due = False
            self._write_queue()

    def _write_queue(self) -> None:
        queue, self._queue = self._queue, []
        if self._out is None or not queue:
            return
        if len(queue) == 1:
            self._out.write(queue[0])
        else:
            self._out.writelines(queue)

    def _write_whole_responses(self) -> None:
        responses, self._whole_responses = self._whole_responses, {}
        for connection, calls in responses.items():
            connection.write(
                calls[0].whole_frames if len(calls) == 1 else b"".join([call.whole_frames for call in calls])
            )
            for call in calls:
                # Not before the write: the last stream of a connection that drains closes it.
                connection.closed_locally(call)
