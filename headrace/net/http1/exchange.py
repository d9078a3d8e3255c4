# SPDX-License-Identifier: Apache-2.0
"""One HTTP/1.1 request and its response. Made by `reader`, ordered by `protocol`, used by handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.net.http.exchange import Body, Buffer, Exchange, encoded, listed
from headrace.net.http.heads import Fields, RequestHead, ResponseHead, check_field

if TYPE_CHECKING:
    from headrace.net.http.routes import Route
    from headrace.net.http1.protocol import Http1Protocol
    from headrace.net.site import Site

_JOIN_BYTES = 16 * 1024
"""A response up to this size is joined and written in one piece; a larger one is written buffer by buffer."""


_BODILESS = frozenset((100, 101, 102, 103, 204, 304))
"""No body follows these. Nor do they get a length: that of a 304 would have to be the one of the 200 it stands for."""


class Stage:
    """How far the response is. Plain numbers: an enum's members are slow to look up, and this is asked often."""

    WAITING = 0
    STREAMING = 1
    DONE = 2


_WAITING, _STREAMING, _DONE = Stage.WAITING, Stage.STREAMING, Stage.DONE
"""For the path of every request: a name of the module is quicker to look up than one of a class."""


class Pause:
    """Why a connection is not read. Each reason begins and ends by itself; the client is read when none is left."""

    HANDLER = 1
    """A handler asked for it (`pause_body`)."""
    LINE = 2
    """Enough requests wait in line."""
    UPLOAD = 4
    """A streamed request waits in line: its body must not pile up."""
    END = 8
    """Nothing more will be read as HTTP."""


class Http1Exchange(Exchange):
    """See `Exchange`. `stage` and the fields below it are for this room only."""

    # Defaults on the class for what most requests never touch, since making an exchange is on every request's path. What
    # all of them ask for is set by `made_exchange`: an instance's own attribute is found several times as quickly.
    peer_address = b""
    on_disconnect: Callable[[], None] | None = None
    on_body: Callable[[bytes], None] | None = None
    on_body_end: Callable[[], None] | None = None
    on_writable: Callable[[], None] | None = None
    dispatched = False
    wants_leave = False
    """The client of a streamed request waits for 100 Continue."""
    taken_over = False
    leftover = b""
    _chunked = False
    _silent = False
    _keeps = False
    _early_pieces: list[bytes] | None = None
    ends_early = False
    """The body had come to its end, or there is none, when the handler of a streamed request was called."""

    _connection: Http1Protocol
    route: Route
    keep_alive: bool
    stage: int

    @property
    def peer(self) -> str:
        """See `Exchange.peer`."""
        return self._connection.peer

    @property
    def site(self) -> Site:
        """The site it came to, for a protocol that takes the connection over."""
        return self._connection.site

    @property
    def started(self) -> bool:
        """See `Exchange.started`."""
        return self.stage != Stage.WAITING

    @property
    def closed(self) -> bool:
        """See `Exchange.closed`."""
        return self.stage == _DONE

    def respond(self, head: ResponseHead, body: Body = b"", extra: Fields = ()) -> None:
        """See `Exchange.respond`."""
        if self.stage:
            return
        connection = self._connection
        status = head.status
        buffers = body if body.__class__ is list else listed(body)
        request = self.head
        accept = request.by_name.get(b"accept-encoding")
        if accept is not None:
            buffers, extra = encoded(accept, head, buffers, extra)
        length = 0
        for buffer in buffers:
            length += len(buffer)
        if request.method == b"HEAD" or status in _BODILESS:
            buffers = []
        close = not self.keep_alive or (connection.ending and connection.closes_after(self))
        # An HTTP/1.0 client that asked to keep the connection has to be told that it is kept.
        ending = (
            b"connection: close\r\n" if close else b"" if request.version == "1.1" else b"connection: keep-alive\r\n"
        )
        text = b"%b%b%b%b%b\r\n" % (
            head.http1,
            connection.site.date_line,
            b"" if status in _BODILESS else b"content-length: %d\r\n" % length,
            _lines(extra) if extra else b"",
            ending,
        )
        if self.more_lines:
            text = b"%b%b\r\n" % (text[:-2], self.more_lines)
        if length <= _JOIN_BYTES:
            data = b"".join([text, *buffers])
            # Only now: what fails above, a bad field or a body that is no bytes, can still be answered by an error.
            self.stage = _DONE
            connection.finished(self, status, close, data)
        else:
            self.stage = Stage.STREAMING
            connection.write_many([text, *buffers])
            self.stage = _DONE
            connection.finished(self, status, close)

    def respond_written(self, head: ResponseHead, lines: bytes, body: Buffer) -> None:
        """See `Exchange.respond_written`."""
        connection = self._connection
        if self.stage or not self.keep_alive or connection.ending or self.head.version != "1.1":
            self.respond(head, body)
            return
        self.stage = _DONE
        data = b"".join((lines, connection.site.date_line, self.more_lines, b"\r\n", body))
        connection.finished(self, head.status, False, data)

    def start(self, head: ResponseHead, extra: Fields = ()) -> None:
        """See `Exchange.start`."""
        if self.stage:
            return
        connection = self._connection
        text = head.http1 + connection.site.date_line + _lines(extra) + self.more_lines
        self.stage = Stage.STREAMING
        self._silent = self.head.method == b"HEAD" or head.status in _BODILESS
        if self.head.version == "1.1":
            has_length = any(name == b"content-length" for name, _ in (*head.fields, *extra))
            if not has_length and not self._silent:
                self._chunked = True
                text += b"transfer-encoding: chunked\r\n"
        else:
            # HTTP/1.0 has no chunks: the end of the body is the end of the connection.
            self.keep_alive = False
        text += b"connection: close\r\n\r\n" if connection.closes_after(self) else b"\r\n"
        connection.write(text)
        connection.response_started(self, head.status)

    def send(self, data: Buffer) -> bool:
        """See `Exchange.send`."""
        connection = self._connection
        if self.stage == Stage.STREAMING and len(data) and not self._silent:
            if not self._chunked:
                connection.write(data)
            elif len(data) <= _JOIN_BYTES:
                connection.write(b"%x\r\n%b\r\n" % (len(data), bytes(data)))
            else:
                connection.write_many([b"%x\r\n" % len(data), data, b"\r\n"])
        return not connection.write_paused

    def send_chunk(self, data: bytes, begin: int) -> bool:
        """See `Exchange.send_chunk`."""
        if self.stage != _STREAMING or not self._chunked or self._silent:
            return self.send(data[begin:-2])
        connection = self._connection
        connection.write(data)
        return not connection.write_paused

    def finish(self) -> None:
        """See `Exchange.finish`."""
        if self.stage != Stage.STREAMING:
            return
        self.stage = _DONE
        connection = self._connection
        last = b"0\r\n\r\n" if self._chunked else b""
        connection.finished(self, 0, connection.closes_after(self), last)

    def abort(self) -> None:
        """See `Exchange.abort`."""
        if self.stage != _DONE:
            self.stage = _DONE
            if self.on_over is not None:
                self.on_over()
            self._connection.abort()

    def pause_body(self) -> None:
        """See `Exchange.pause_body`."""
        if self.stage != _DONE:
            self._connection.pause_reading(Pause.HANDLER)

    def resume_body(self) -> None:
        """See `Exchange.resume_body`."""
        if self.stage != _DONE:
            self._connection.resume_reading(Pause.HANDLER)

    def take_over(self) -> tuple[asyncio.Transport, bytes]:
        """Detach the connection from HTTP: its transport, and what was received after the request's head."""
        self.stage = _DONE
        self.taken_over = True
        if self.on_over is not None:
            self.on_over()
        return self._connection.detach(), self.leftover

    # Called by `reader` and `protocol`.

    def body_begins(self) -> None:
        """A streamed body is on its way. Until it has come, an answer has to be the connection's last."""
        self._keeps, self.keep_alive = self.keep_alive, False

    def body_arrived(self, data: bytes) -> None:
        """Hand a piece of a streamed body on, or keep it until the handler has been called."""
        if not self.dispatched:
            if self._early_pieces is None:
                self._early_pieces = []
            self._early_pieces.append(data)
        elif self.on_body is not None and self.stage != _DONE:
            self._connection.guard(self, self.on_body, data)

    def body_ended(self) -> None:
        """A streamed body is whole: tell the handler, or remember to tell it."""
        if self.stage == Stage.WAITING:
            self.keep_alive = self._keeps
        if not self.dispatched:
            self.ends_early = True
        elif self.on_body_end is not None and self.stage != _DONE:
            self._connection.guard(self, self.on_body_end)

    def release_early_body(self) -> None:
        """The handler has been called: give it what came before."""
        pieces, self._early_pieces = self._early_pieces, None
        for piece in pieces or ():
            self.body_arrived(piece)
        if self.ends_early and self.on_body_end is not None and self.stage != _DONE:
            self._connection.guard(self, self.on_body_end)

    def disconnected(self) -> None:
        """The client has gone."""
        if self.stage != _DONE:
            self.stage = _DONE
            if self.on_over is not None:
                self.on_over()
            if self.on_disconnect is not None:
                self._connection.guard(self, self.on_disconnect)


def made_exchange(
    connection: Http1Protocol, head: RequestHead, route: Route, params: tuple[str, ...] = (), body: Buffer = b""
) -> Http1Exchange:
    """A request that has come. In place of `__init__`, which would have to be called by way of C, for every request."""
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
