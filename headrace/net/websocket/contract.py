# SPDX-License-Identifier: Apache-2.0
"""A WebSocket as its owner sees it, whoever has the connection: ours (`connection`) or another server (`wire.hosted`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.core.errors import HeadraceError
from headrace.core.ids import REQUEST_ID_FIELD, request_id
from headrace.net.websocket import closing

if TYPE_CHECKING:
    from headrace.net.http.exchange import Buffer
    from headrace.net.http.heads import RequestHead

log = logging.getLogger("headrace.net.websocket")


class WebSocket:
    """After the end, every method does nothing. Use it from the loop's thread only."""

    head: RequestHead
    """The request that opened it."""
    peer: str
    """The client's address, for logs."""
    subprotocol: str | None
    """What was agreed on, if anything."""
    on_message: Callable[[str | bytes], object] | None = None
    """Called with each message: `str` for text, `bytes` for binary. What it raises closes the connection."""
    on_close: Callable[[int, str], None] | None = None
    """Called once, with the client's code and reason, ours if we had to fail it, or 1006 if it just broke off."""
    on_writable: Callable[[], None] | None = None
    """Called when `send` may be called again after it returned False."""

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more: closing has begun, or the client has gone."""
        raise NotImplementedError

    def send(self, message: str | Buffer) -> bool:
        """Send a text (`str`) or binary message. False asks the caller to wait for `on_writable` (or `on_close`)."""
        raise NotImplementedError

    def close(self, code: int = closing.NORMAL, reason: str = "") -> None:
        """Begin to close; the client's answer ends it. No message is delivered after this call."""
        raise NotImplementedError

    def pause_messages(self) -> None:
        """Ask for no more `on_message` calls: the client is held back. Pongs and a close are not seen either."""
        raise NotImplementedError

    def resume_messages(self) -> None:
        """Undo `pause_messages`; messages that had come already are delivered before this returns."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Close with the code for an error (`closing.CLOSE_CODE`).

        An exception that is not ours goes to the log, and only the id to find it there goes to the client.
        """
        if isinstance(error, HeadraceError):
            self.close(closing.CLOSE_CODE[error.code], error.message)
            return
        found_by = request_id(self.head.get(REQUEST_ID_FIELD.encode()))
        details = {"request_id": found_by, "path": self.head.path.decode("latin-1"), "peer": self.peer}
        log.error("a WebSocket handler failed", exc_info=error, extra=details)
        self.close(closing.INTERNAL, f"internal error; the server's log has the details under {found_by}")

    def guard(self, callback: Callable[..., object], *arguments: object) -> None:
        """Call the owner; what it raises closes the connection."""
        try:
            callback(*arguments)
        except Exception as error:
            self.fail(error)

    def told_closed(self, code: int, reason: str) -> None:
        """Tell the owner of the end, once. For who has the connection."""
        on_close, self.on_close = self.on_close, None
        self.on_message = self.on_writable = None
        if on_close is not None:
            try:
                on_close(code, reason)
            except Exception:
                log.exception("a WebSocket handler failed", extra={"path": self.head.path.decode("latin-1")})
