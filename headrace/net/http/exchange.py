# SPDX-License-Identifier: Apache-2.0
"""One request and its response, as a handler sees them, whatever the HTTP version underneath.

The wire calls `handler(exchange)` once; the handler answers now or later, from the event loop's thread, by `respond`
(whole) or by `start`, `send`..., `finish` (streamed). No coroutine is involved unless the handler starts one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import ceil

import orjson

from headrace.core.errors import INTERNAL_TEXT, HeadraceError
from headrace.core.ids import REQUEST_ID_FIELD, request_id
from headrace.net.http.coding import choose_coding, deflate
from headrace.net.http.heads import CONTENT_TYPE, JSON, Fields, RequestHead, ResponseHead
from headrace.net.http.status import HTTP_STATUS

log = logging.getLogger("headrace.wire")

Buffer = bytes | bytearray | memoryview
_BUFFER_TYPES = (bytes, bytearray, memoryview)
Body = Buffer | Sequence[Buffer]
Handler = Callable[["Exchange"], None]


class Exchange:
    """Base of `http1.exchange.Http1Exchange` and `http2.exchange.Http2Exchange`.

    Every method must be called from the loop's thread. After the client has gone, all of them do nothing.
    """

    head: RequestHead
    body: Buffer
    """The whole request body; empty for a route that streams its body."""
    params: tuple[str, ...]
    """What the route's placeholders matched, decoded, in order."""
    on_disconnect: Callable[[], None] | None
    """Called once if the client goes away before the response is finished. Set it to cancel work."""
    on_body: Callable[[bytes], None] | None
    """For a route that streams its body: called with each piece as it comes."""
    on_body_end: Callable[[], None] | None
    """For a route that streams its body: called once after the last piece."""
    on_writable: Callable[[], None] | None
    """Called when `send` may be called again after it returned False."""
    on_over: Callable[[], None] | None = None
    """Called once when the exchange is over: answered in full, cut, taken over, or its client gone. For who counts
    requests, not for handlers; must not raise."""
    more_lines = b""
    """Fields of the response beside the handler's, whatever it answers: `name: value` and CR LF, each. Not checked: for
    fields that are ours."""

    @property
    def peer(self) -> str:
        """The client's address, for logs."""
        raise NotImplementedError

    @property
    def peer_address(self) -> bytes:
        """The same without the port, for X-Forwarded-For."""
        return address_in(self.peer)

    @property
    def started(self) -> bool:
        """Whether a response head has gone out, so that no other can."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether the response is complete or the client has gone."""
        raise NotImplementedError

    def respond(self, head: ResponseHead, body: Body = b"", extra: Fields = ()) -> None:
        """Send a whole response. `body` may be several buffers, which are written without being joined."""
        raise NotImplementedError

    def respond_written(self, head: ResponseHead, lines: bytes, body: Buffer) -> None:
        """As `respond`, for a proxy that has written `lines` before: the whole of an HTTP/1.1 head, but for the date.

        Not for HEAD, and only for a body that may be copied.
        """
        self.respond(head, body)

    def start(self, head: ResponseHead, extra: Fields = ()) -> None:
        """Send a response head; the body follows by `send` and ends by `finish`."""
        raise NotImplementedError

    def send(self, data: Buffer) -> bool:
        """Send a piece of a streamed body. False asks the caller to wait for `on_writable`."""
        raise NotImplementedError

    def send_chunk(self, data: bytes, begin: int) -> bool:
        """The same, for a piece that comes as one chunk of HTTP/1.1: its text is `data[begin:-2]`."""
        return self.send(data[begin:-2])

    def finish(self) -> None:
        """End a streamed body."""
        raise NotImplementedError

    def abort(self) -> None:
        """End the exchange so that the client sees it was cut: a response that was begun cannot be taken back."""
        raise NotImplementedError

    def pause_body(self) -> None:
        """Ask for no more `on_body` calls: the client is held back by flow control."""
        raise NotImplementedError

    def resume_body(self) -> None:
        """Undo `pause_body`."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Answer an error as JSON `{"error": ...}`, or cut the response if it has begun.

        An exception that is not ours goes to the log, and only the id to find it there goes to the client.
        """
        if not isinstance(error, HeadraceError):
            self._fail_internally(error)
            return
        if self.started:
            self.abort()
            return
        extra: Fields = ()
        if error.retry_after_seconds is not None:
            extra = ((b"retry-after", b"%d" % max(1, ceil(error.retry_after_seconds))),)
        self.respond(_ERROR_HEADS[HTTP_STATUS[error.code]], _error_json(error.message), extra)

    def _fail_internally(self, error: BaseException) -> None:
        head = self.head
        found_by = request_id(head.get(REQUEST_ID_FIELD.encode()))
        details = {"request_id": found_by, "path": head.path.decode("latin-1"), "peer": self.peer}
        log.error("a request failed", exc_info=error, extra=details)
        if self.started:
            self.abort()
        else:
            extra = ((REQUEST_ID_FIELD.encode(), found_by.encode()),)
            self.respond(_INTERNAL_HEAD, _error_json(INTERNAL_TEXT), extra)


def address_in(peer: str) -> bytes:
    """The address alone of a client that logs call so; `unknown` where it has none."""
    return (peer.rpartition(":")[0].strip("[]") or "unknown").encode()


def listed(body: Body) -> list[Buffer]:
    """A body as a list of buffers."""
    if isinstance(body, _BUFFER_TYPES):
        return [body]
    return body if isinstance(body, list) else list(body)


def encoded(accept: bytes, head: ResponseHead, buffers: list[Buffer], extra: Fields) -> tuple[list[Buffer], Fields]:
    """Compress a body if the client accepts it, it is worth it, and the handler has not done so already."""
    if head.raw:
        return buffers, extra
    size = sum(map(len, buffers))
    coding = choose_coding(accept) if _COMPRESS_BYTES[0] <= size <= _COMPRESS_BYTES[1] else None
    if coding is None or any(name == b"content-encoding" for name, _ in (*head.fields, *extra)):
        return buffers, extra
    return [deflate(coding, buffers)], (*extra, (b"content-encoding", coding), (b"vary", b"accept-encoding"))


_COMPRESS_BYTES = (1024, 8 * 1024 * 1024)
"""Sizes worth compressing when the client accepts it: below, nothing is saved; above, the loop would stand still."""


def _error_json(message: str) -> bytes:
    # A message may quote what a client sent; what is no text in it must not become an error in the error.
    return orjson.dumps({"error": message.encode(errors="replace").decode()})


_ERROR_HEADS = {status: ResponseHead(status, [(CONTENT_TYPE, JSON)]) for status in set(HTTP_STATUS.values())}
_INTERNAL_HEAD = _ERROR_HEADS[500]
