# SPDX-License-Identifier: Apache-2.0
"""A WebSocket as its owner sees it, and the close codes.

`connection.WebSocketConnection` implements it on our own connections, `asgi_app.AsgiWebSocket` on those of another server.
Close codes come from the IANA registry (https://www.iana.org/assignments/websocket), so that any client has a name for
them; the 4000s stay free for applications.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import IntEnum

from headrace.core.errors import Code, HeadraceError
from headrace.core.names import REQUEST_ID_FIELD, request_id
from headrace.net.http.heads import Buffer, RequestHead

log = logging.getLogger("headrace.wire.websocket")


class CloseCode(IntEnum):
    """Close codes in use."""

    NORMAL = 1000
    GOING_AWAY = 1001
    UNSUPPORTED_DATA = 1003
    ABNORMAL = 1006
    """Never sent: passed to `on_close` when the connection ended without a close frame."""
    INVALID_DATA = 1007
    POLICY = 1008
    TOO_BIG = 1009
    INTERNAL = 1011
    TRY_AGAIN_LATER = 1013
    UNAUTHORIZED = 3000
    FORBIDDEN = 3003
    TIMEOUT = 3008


CLOSE_CODE: dict[Code, int] = {
    Code.INVALID_ARGUMENT: CloseCode.POLICY,
    Code.NOT_FOUND: CloseCode.POLICY,
    Code.ALREADY_EXISTS: CloseCode.POLICY,
    Code.UNAUTHENTICATED: CloseCode.UNAUTHORIZED,
    Code.PERMISSION_DENIED: CloseCode.FORBIDDEN,
    Code.FAILED_PRECONDITION: CloseCode.POLICY,
    Code.TOO_LARGE: CloseCode.TOO_BIG,
    Code.RESOURCE_EXHAUSTED: CloseCode.TRY_AGAIN_LATER,
    Code.DEADLINE_EXCEEDED: CloseCode.TIMEOUT,
    Code.CANCELLED: CloseCode.GOING_AWAY,
    Code.UNIMPLEMENTED: CloseCode.UNSUPPORTED_DATA,
    Code.UNAVAILABLE: CloseCode.TRY_AGAIN_LATER,
    Code.INTERNAL: CloseCode.INTERNAL,
}
"""Every error code as a close code. RFC 6455 has 1008 for errors without a better code."""

_REASON_BYTES = 123
"""A control frame carries 125 bytes, two of which are the code."""

_SENDABLE = frozenset((1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014))


def may_be_sent(code: int) -> bool:
    """Return whether a close frame may carry this code."""
    return code in _SENDABLE or 3000 <= code < 5000


def fit_reason(reason: str) -> str:
    """Return the reason, cut at a character so that it fits a close frame."""
    data = reason.encode("utf-8", "replace")
    return data[:_REASON_BYTES].decode("utf-8", "ignore")


class WebSocket:
    """Base class. After the end, every method does nothing. Used from the event loop's thread only."""

    head: RequestHead
    """The request that opened it."""
    peer: str
    """The client's address, for logs."""
    subprotocol: str | None
    """The negotiated subprotocol, if any."""
    on_message: Callable[[str | bytes], object] | None = None
    """Called with each message: `str` for text, `bytes` for binary. An exception closes the connection."""
    on_close: Callable[[int, str], None] | None = None
    """Called once, with the client's code and reason, ours after a protocol error, or 1006 without a close frame."""
    on_writable: Callable[[], None] | None = None
    """Called when `send` may be called again after it returned False."""

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more: closing has begun, or the client has disconnected."""
        raise NotImplementedError

    def send(self, message: str | Buffer) -> bool:
        """Send a text (`str`) or binary message. False asks the caller to wait for `on_writable` (or `on_close`)."""
        raise NotImplementedError

    def close(self, code: int = CloseCode.NORMAL, reason: str = "") -> None:
        """Start to close; the client's answer completes it. No message is delivered after this call."""
        raise NotImplementedError

    def pause_messages(self) -> None:
        """Stop `on_message` calls and reading from the client, pongs and close frames included."""
        raise NotImplementedError

    def resume_messages(self) -> None:
        """Undo `pause_messages`; messages already received are delivered before this returns."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Close with the code for an error (`CLOSE_CODE`).

        An unexpected exception is logged, and the client gets only the id under which the log has it.
        """
        if isinstance(error, HeadraceError):
            self.close(CLOSE_CODE[error.code], error.message)
            return
        log_id = request_id(self.head.get(REQUEST_ID_FIELD.encode()))
        details = {"request_id": log_id, "path": self.head.path.decode("latin-1"), "peer": self.peer}
        log.error("WebSocket handler failed", exc_info=error, extra=details)
        self.close(CloseCode.INTERNAL, f"internal error; the server's log has the details under {log_id}")

    def guard(self, callback: Callable[..., object], *arguments: object) -> None:
        """Call the owner; an exception closes the connection."""
        try:
            callback(*arguments)
        except Exception as error:
            self.fail(error)

    def notify_closed(self, code: int, reason: str) -> None:
        """Call `on_close`, once. For the connection, not for the owner."""
        on_close, self.on_close = self.on_close, None
        self.on_message = self.on_writable = None
        if on_close is not None:
            try:
                on_close(code, reason)
            except Exception:
                log.exception("WebSocket handler failed", extra={"path": self.head.path.decode("latin-1")})
