# SPDX-License-Identifier: Apache-2.0
"""One HTTP/1.1 request and its response. Made by `reader`, ordered by `connection`, used by handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from headrace.net.http.exchange import Body, Exchange, buffer_list, compress_body
from headrace.net.http.heads import Buffer, Fields, RequestHead, ResponseHead, check_field
from headrace.net.http.routes import Route
from headrace.net.site import Site

_JOIN_BYTES = 16 * 1024
"""A response up to this size is joined and written in one piece; a larger one is written buffer by buffer."""


class Stage:
    """State of the response. Plain numbers: an enum's members are slow to look up, and every request reads them."""

    WAITING = 0
    STREAMING = 1
    DONE = 2


_WAITING, _STREAMING, _DONE = Stage.WAITING, Stage.STREAMING, Stage.DONE
"""For the hot path: a module's name is quicker to look up than a class attribute."""


class PauseReason:
    """Why reading is paused, as bits. Reasons are set and cleared independently; reading resumes when none is left."""

    HANDLER = 1
    """A handler called `pause_body`."""
    QUEUE = 2
    """The queue of pipelined requests is full."""
    UPLOAD = 4
    """A streamed request is queued: its body must not pile up."""
    END = 8
    """Nothing more will be read as HTTP."""


class ExchangeConnection(Protocol):
    """The connection as its exchanges see it; `connection.Http1Connection` implements it."""

    site: Site
    peer: str
    peer_address: bytes
    ending: bool
    write_paused: bool

    def write(self, data: Buffer) -> None:
        """Write bytes to the socket."""

    def write_many(self, buffers: list[Buffer]) -> None:
        """Write several buffers to the socket without joining them."""

    def response_started(self, exchange: Http1Exchange, status: int) -> None:
        """Note that the head of a streamed response has been sent."""

    def finished(self, exchange: Http1Exchange, status: int, close: bool, data: Buffer = b"") -> None:
        """Write the last bytes of the current response, and go on with the next request."""

    def closes_after(self, exchange: Http1Exchange) -> bool:
        """Return whether the connection closes after this response."""
        ...

    def guard(self, exchange: Http1Exchange, callback: Callable[..., object], *arguments: object) -> None:
        """Call a handler's callback; an exception fails the exchange, not the connection."""

    def pause_reading(self, reason: int) -> None:
        """Stop reading from the socket."""

    def resume_reading(self, reason: int) -> None:
        """Undo `pause_reading` for this reason."""

    def detach(self) -> asyncio.Transport:
        """Give the transport to another protocol."""
        ...

    def abort(self) -> None:
        """Close at once."""


class Http1Exchange(Exchange):
    """An `Exchange` on an HTTP/1.1 connection. `stage` and the attributes below it are for this package only."""

    # Defaults on the class for what most requests never set, since every request makes an exchange. What every request
    # reads is set by `new_exchange`: an instance attribute is found several times as quickly.
    peer_address = b""
    on_disconnect: Callable[[], None] | None = None
    on_body: Callable[[bytes], None] | None = None
    on_body_end: Callable[[], None] | None = None
    on_writable: Callable[[], None] | None = None
    dispatched = False
    expects_continue = False
    """Whether the client of a streamed request waits for 100 Continue."""
    leftover = b""
    _chunked = False
    _bodiless = False
    _keep_alive_after_body = False
    _early_pieces: list[bytes] | None = None
    ends_early = False
    """Whether the body was complete, or there is none, when the handler of a streamed request was called."""

    _connection: ExchangeConnection
    route: Route
    keep_alive: bool
    stage: int

    @property
    def peer(self) -> str:
        """The client's address, for logs."""
        return self._connection.peer

    @property
    def site(self) -> Site:
        """The server's shared state, for a protocol that takes the connection over."""
        return self._connection.site

    @property
    def started(self) -> bool:
        """Whether a response head has been sent."""
        return self.stage != Stage.WAITING

    @property
    def closed(self) -> bool:
        """Whether the response is complete or the client has disconnected."""
        return self.stage == _DONE

    def respond(self, head: ResponseHead, body: Body = b"", extra: Fields = ()) -> None:
        """Send a complete response."""
        if self.stage:
            return
        connection = self._connection
        status = head.status
        buffers = body if body.__class__ is list else buffer_list(body)
        request = self.head
        if request.is_simple and self.keep_alive and not connection.ending and head.has_body and not extra:
            # What the code below does for a response that needs none of its decisions.
            length = 0
            for buffer in buffers:
                length += len(buffer)
            if length <= _JOIN_BYTES:
                text = b"content-length: %d\r\n%b\r\n" % (length, self.more_lines)
                data = b"".join((head.http1, connection.site.date_line, text, *buffers))
                self.stage = _DONE
                connection.finished(self, status, False, data)
                return
        accept = request.by_name.get(b"accept-encoding")
        if accept is not None:
            buffers, extra = compress_body(accept, head, buffers, extra)
        length = 0
        for buffer in buffers:
            length += len(buffer)
        if request.method == b"HEAD" or not head.has_body:
            buffers = []
        close = not self.keep_alive or (connection.ending and connection.closes_after(self))
        # An HTTP/1.0 client that asked for keep-alive expects it to be confirmed.
        ending = (
            b"connection: close\r\n" if close else b"" if request.version == "1.1" else b"connection: keep-alive\r\n"
        )
        text = b"%b%b%b%b%b\r\n" % (
            head.http1,
            connection.site.date_line,
            b"content-length: %d\r\n" % length if head.has_body else b"",
            _lines(extra) if extra else b"",
            ending,
        )
        if self.more_lines:
            text = b"%b%b\r\n" % (text[:-2], self.more_lines)
        if length <= _JOIN_BYTES:
            data = b"".join([text, *buffers])
            # Only now: a failure above (a bad field, a body that is not bytes) can still be answered by an error.
            self.stage = _DONE
            connection.finished(self, status, close, data)
        else:
            self.stage = Stage.STREAMING
            connection.write_many([text, *buffers])
            self.stage = _DONE
            connection.finished(self, status, close)

    def respond_written(self, head: ResponseHead, lines: bytes, body: Buffer) -> None:
        """Send a complete response whose HTTP/1.1 head the caller has encoded."""
        connection = self._connection
        if self.stage or not self.keep_alive or connection.ending or self.head.version != "1.1":
            self.respond(head, body)
            return
        self.stage = _DONE
        data = b"".join((lines, connection.site.date_line, self.more_lines, b"\r\n", body))
        connection.finished(self, head.status, False, data)

    def start(self, head: ResponseHead, extra: Fields = ()) -> None:
        """Send a response head; the body follows by `send`."""
        if self.stage:
            return
        connection = self._connection
        text = head.http1 + connection.site.date_line + _lines(extra) + self.more_lines
        self.stage = Stage.STREAMING
        self._bodiless = self.head.method == b"HEAD" or not head.has_body
        if self.head.version == "1.1":
            has_length = any(name == b"content-length" for name, _ in (*head.fields, *extra))
            if not has_length and not self._bodiless:
                self._chunked = True
                text += b"transfer-encoding: chunked\r\n"
        else:
            # HTTP/1.0 has no chunks: the end of the body is the end of the connection.
            self.keep_alive = False
        text += b"connection: close\r\n\r\n" if connection.closes_after(self) else b"\r\n"
        connection.write(text)
        connection.response_started(self, head.status)

    def send(self, data: Buffer) -> bool:
        """Send a piece of a streamed body."""
        connection = self._connection
        if self.stage == Stage.STREAMING and len(data) and not self._bodiless:
            if not self._chunked:
                connection.write(data)
            elif len(data) <= _JOIN_BYTES:
                connection.write(b"%x\r\n%b\r\n" % (len(data), bytes(data)))
            else:
                connection.write_many([b"%x\r\n" % len(data), data, b"\r\n"])
        return not connection.write_paused

    def send_chunk(self, data: bytes, begin: int) -> bool:
        """Send a piece of a streamed body that is encoded as one chunk already."""
        if self.stage != _STREAMING or not self._chunked or self._bodiless:
            return self.send(data[begin:-2])
        connection = self._connection
        connection.write(data)
        return not connection.write_paused

    def finish(self) -> None:
        """End a streamed body."""
        if self.stage != Stage.STREAMING:
            return
        self.stage = _DONE
        connection = self._connection
        last = b"0\r\n\r\n" if self._chunked else b""
        connection.finished(self, 0, connection.closes_after(self), last)

    def abort(self) -> None:
        """Close the connection, so that the client sees an incomplete response."""
        if self.stage != _DONE:
            self.stage = _DONE
            if self.on_over is not None:
                self.on_over()
            self._connection.abort()

    def pause_body(self) -> None:
        """Stop reading from the client."""
        if self.stage != _DONE:
            self._connection.pause_reading(PauseReason.HANDLER)

    def resume_body(self) -> None:
        """Read from the client again."""
        if self.stage != _DONE:
            self._connection.resume_reading(PauseReason.HANDLER)

    def take_over(self) -> tuple[asyncio.Transport, bytes]:
        """Detach the connection from HTTP; return its transport and the bytes received after the request's head."""
        self.stage = _DONE
        if self.on_over is not None:
            self.on_over()
        return self._connection.detach(), self.leftover

    # Called by `reader` and `connection`.

    def body_started(self) -> None:
        """Disable keep-alive until a streamed body is complete."""
        self._keep_alive_after_body, self.keep_alive = self.keep_alive, False

    def body_arrived(self, data: bytes) -> None:
        """Pass a piece of a streamed body to the handler, or keep it until the handler has been called."""
        if not self.dispatched:
            if self._early_pieces is None:
                self._early_pieces = []
            self._early_pieces.append(data)
        elif self.on_body is not None and self.stage != _DONE:
            self._connection.guard(self, self.on_body, data)

    def body_ended(self) -> None:
        """Tell the handler that a streamed body is complete, at once or when it has been called."""
        if self.stage == Stage.WAITING:
            self.keep_alive = self._keep_alive_after_body
        if not self.dispatched:
            self.ends_early = True
        elif self.on_body_end is not None and self.stage != _DONE:
            self._connection.guard(self, self.on_body_end)

    def release_early_body(self) -> None:
        """Pass on what arrived before the handler was called."""
        pieces, self._early_pieces = self._early_pieces, None
        for piece in pieces or ():
            self.body_arrived(piece)
        if self.ends_early and self.on_body_end is not None and self.stage != _DONE:
            self._connection.guard(self, self.on_body_end)

    def disconnected(self) -> None:
        """End the exchange and notify the handler that the client has disconnected."""
        if self.stage != _DONE:
            self.stage = _DONE
            if self.on_over is not None:
                self.on_over()
            if self.on_disconnect is not None:
                self._connection.guard(self, self.on_disconnect)


def new_exchange(
    connection: ExchangeConnection, head: RequestHead, route: Route, params: tuple[str, ...] = (), body: Buffer = b""
) -> Http1Exchange:
    """Make the exchange of a request. Replaces `__init__`, whose call goes through C and costs more per request."""
    exchange = Http1Exchange()
    exchange._connection = connection
    exchange.peer_address = connection.peer_address
    exchange.head = head
    exchange.route = route
    exchange.params = params
    exchange.body = body
    exchange.keep_alive = True
    exchange.stage = _WAITING
    exchange.more_lines = b""
    exchange.on_over = None
    return exchange


def _lines(fields: Fields) -> bytes:
    lines = []
    for name, value in fields:
        check_field(name, value)
        lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join(lines)
