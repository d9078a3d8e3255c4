# SPDX-License-Identifier: Apache-2.0
"""One HTTP request and its response, as a handler sees them, whatever the HTTP version.

The connection calls `handler(exchange)` once; the handler answers, at once or later, in the event loop's thread, with
`respond` (complete) or with `start`, `send`..., `finish` (streamed). No coroutine runs unless the handler starts one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import ceil

import orjson

from headrace.core.errors import INTERNAL_TEXT, HeadraceError
from headrace.core.names import REQUEST_ID_FIELD, request_id
from headrace.net.http.coding import choose_coding, deflate
from headrace.net.http.heads import CONTENT_TYPE, HTTP_STATUS, JSON, Buffer, Fields, RequestHead, ResponseHead

log = logging.getLogger("headrace.wire")

_BUFFER_TYPES = (bytes, bytearray, memoryview)
Body = Buffer | Sequence[Buffer]
Handler = Callable[["Exchange"], None]


class Exchange:
    """Base of `http1.exchange.Http1Exchange`, `http2.exchange.Http2Exchange` and `asgi_app.AsgiExchange`.

    Every method must be called from the event loop's thread. After the client has disconnected, all of them do nothing.
    """

    head: RequestHead
    body: Buffer
    """The complete request body; empty for a route that streams its body."""
    params: tuple[str, ...]
    """Values of the route's placeholders, decoded, in order."""
    on_disconnect: Callable[[], None] | None
    """Called once if the client disconnects before the response is complete. Set it to cancel work."""
    on_body: Callable[[bytes], None] | None
    """For a route that streams its body: called with each piece as it arrives."""
    on_body_end: Callable[[], None] | None
    """For a route that streams its body: called once after the last piece."""
    on_writable: Callable[[], None] | None
    """Called when `send` may be called again after it returned False."""
    on_over: Callable[[], None] | None = None
    """Called once when the exchange ends: answered, aborted, taken over, or its client disconnected. For code that counts
    requests, not for handlers; must not raise."""
    caller = ""
    """The name of the API key of the request; "" if the server needs none."""
    more_lines = b""
    """More response fields, whatever the handler answers: `name: value` and CR LF, each. Not checked: only for fields that
    this project sets."""

    @property
    def peer(self) -> str:
        """The client's address, for logs."""
        raise NotImplementedError

    @property
    def peer_address(self) -> bytes:
        """The client's address without the port, for X-Forwarded-For."""
        return peer_host(self.peer)

    @property
    def started(self) -> bool:
        """Whether a response head has been sent, so that no other can be."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether the response is complete or the client has disconnected."""
        raise NotImplementedError

    def respond(self, head: ResponseHead, body: Body = b"", extra: Fields = ()) -> None:
        """Send a complete response. `body` may be several buffers, which are written without being joined."""
        raise NotImplementedError

    def respond_written(self, head: ResponseHead, lines: bytes, body: Buffer) -> None:
        """Send a complete response from a proxy that has encoded `lines`: an HTTP/1.1 head without the date.

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
        """Send a piece that is encoded as one HTTP/1.1 chunk already: its content is `data[begin:-2]`."""
        return self.send(data[begin:-2])

    def finish(self) -> None:
        """End a streamed body."""
        raise NotImplementedError

    def abort(self) -> None:
        """End the exchange so that the client sees an incomplete response: a sent head cannot be taken back."""
        raise NotImplementedError

    def pause_body(self) -> None:
        """Stop `on_body` calls: flow control stops the client."""
        raise NotImplementedError

    def resume_body(self) -> None:
        """Undo `pause_body`."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Answer an error as JSON `{"error": ...}`, or abort the response if it has started.

        An unexpected exception is logged, and the client gets only the id under which the log has it.
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
        log_id = request_id(head.get(REQUEST_ID_FIELD.encode()))
        details = {"request_id": log_id, "path": head.path.decode("latin-1"), "peer": self.peer}
        log.error("request failed", exc_info=error, extra=details)
        if self.started:
            self.abort()
        else:
            extra = ((REQUEST_ID_FIELD.encode(), log_id.encode()),)
            self.respond(_INTERNAL_HEAD, _error_json(INTERNAL_TEXT), extra)


def peer_host(peer: str) -> bytes:
    """Return the address of `Exchange.peer` without the port; `unknown` if it has none."""
    return (peer.rpartition(":")[0].strip("[]") or "unknown").encode()


def buffer_list(body: Body) -> list[Buffer]:
    """Return a body as a list of buffers."""
    if isinstance(body, _BUFFER_TYPES):
        return [body]
    return body if isinstance(body, list) else list(body)


def compress_body(
    accept: bytes, head: ResponseHead, buffers: list[Buffer], extra: Fields
) -> tuple[list[Buffer], Fields]:
    """Compress a body if the client accepts it, the size is worth it, and the handler has not compressed it."""
    if head.raw:
        return buffers, extra
    size = sum(map(len, buffers))
    coding = choose_coding(accept) if _COMPRESS_BYTES[0] <= size <= _COMPRESS_BYTES[1] else None
    if coding is None or any(name == b"content-encoding" for name, _ in (*head.fields, *extra)):
        return buffers, extra
    return [deflate(coding, buffers)], (*extra, (b"content-encoding", coding), (b"vary", b"accept-encoding"))


_COMPRESS_BYTES = (1024, 8 * 1024 * 1024)
"""Sizes worth compressing: below, nothing is saved; above, the event loop would be blocked for too long."""


def _error_json(message: str) -> bytes:
    # A message may quote what a client sent: invalid Unicode in it must not raise here.
    return orjson.dumps({"error": message.encode(errors="replace").decode()})


_ERROR_HEADS = {status: ResponseHead(status, [(CONTENT_TYPE, JSON)], raw=True) for status in set(HTTP_STATUS.values())}
"""Never compressed: `tritonclient.http.aio` does not inflate errors."""
_INTERNAL_HEAD = _ERROR_HEADS[500]
