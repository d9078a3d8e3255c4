# SPDX-License-Identifier: Apache-2.0
"""The opening handshake: from a request head to the frames' state and the fields of a 101 response, or a refusal.

Called by `accept`, and by `wire.asgi` to refuse a bad handshake before an application sees it. Touches no socket.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

from websockets.datastructures import Headers
from websockets.extensions.permessage_deflate import ServerPerMessageDeflateFactory
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from headrace.net.http.heads import Fields, RequestHead

_READ_BY_US = frozenset((b"connection", b"upgrade", b"origin"))

_UPGRADE: Fields = ((b"upgrade", b"websocket"), (b"connection", b"upgrade"))
_VERSION: Fields = ((b"sec-websocket-version", b"13"),)

_BAD = (
    "the WebSocket handshake is not valid: it needs one Sec-WebSocket-Key of 16 bytes in base64, at most one Origin, "
    "and well-formed Sec-WebSocket-Protocol and Sec-WebSocket-Extensions fields"
)


class HandshakeRefused(Exception):
    """The request is no valid opening handshake: what to answer instead."""

    def __init__(self, status: int, text: str, fields: Fields = ()) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.fields = fields


def asks_for_websocket(head: RequestHead) -> bool:
    """Whether a request wants to become a WebSocket, validly or not."""
    return head.version == "1.1" and (head.get(b"upgrade") or b"").strip().lower() == b"websocket"


def negotiate(
    head: RequestHead, *, subprotocols: Sequence[str] = (), compression: bool = True, message_bytes: int | None = None
) -> tuple[ServerProtocol, Fields]:
    """The state for the frames to come and the fields of the 101 response; raises `HandshakeRefused`."""
    if head.version != "1.1":
        raise HandshakeRefused(400, "a WebSocket needs HTTP/1.1 here: connect without HTTP/2 or HTTP/1.0")
    if head.method != b"GET":
        raise HandshakeRefused(405, "a WebSocket is opened by GET", ((b"allow", b"GET"),))
    version = head.get(b"sec-websocket-version")
    if asks_for_websocket(head) and version is not None and version.strip() != b"13":
        raise HandshakeRefused(426, "only version 13 of the WebSocket protocol is spoken here", (*_UPGRADE, *_VERSION))
    if (head.get(b"content-length") or b"0") != b"0" or head.get(b"transfer-encoding") is not None:
        raise HandshakeRefused(400, "a WebSocket handshake has no body")
    frames = ServerProtocol(
        # The request has been read already, by httptools: the parser starts with frames.
        state=State.OPEN,
        extensions=[_deflate()] if compression else None,
        subprotocols=cast("Sequence[Subprotocol]", subprotocols),
        select_subprotocol=_select_subprotocol,
        max_size=message_bytes,
        logger=_Quiet(logging.getLogger("headrace.net.websocket"), {}),
    )
    response = frames.accept(_request(head))
    if response.status_code == 426:
        raise HandshakeRefused(426, "this is a WebSocket: connect with a WebSocket client", (*_UPGRADE, *_VERSION))
    if response.status_code != 101:
        raise HandshakeRefused(400, _BAD)
    fields = [
        (name.lower().encode(), value.encode())
        for name, value in response.headers.raw_items()
        if name.lower() != "date"
    ]
    return frames, fields


def _request(head: RequestHead) -> Request:
    headers = Headers()
    for name, value in head.fields:
        if name in _READ_BY_US or name.startswith(b"sec-websocket-"):
            headers[name.decode("latin-1")] = value.decode("latin-1")
    return Request(head.path.decode("latin-1"), headers)


def _select_subprotocol(frames: ServerProtocol, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    # RFC 6455 lets the client decide what to do when there is no common one; the package would refuse with 400.
    for subprotocol in frames.available_subprotocols or ():
        if subprotocol in offered:
            return subprotocol
    return None


def _deflate() -> ServerPerMessageDeflateFactory:
    # 4 KiB windows and little state, as the package itself advises for servers (about 64 KiB less per connection than
    # zlib's defaults); level 1 because messages are compressed in the loop's thread.
    return ServerPerMessageDeflateFactory(
        server_max_window_bits=12, client_max_window_bits=12, compress_settings={"level": 1, "memLevel": 5}
    )


class _Quiet(logging.LoggerAdapter[logging.Logger]):
    """The package logs opening and closing, and at DEBUG what messages say: only its warnings and errors are wanted."""

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802, the name is logging's
        return level >= logging.WARNING and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        return msg, kwargs
