# SPDX-License-Identifier: Apache-2.0
"""How an HTTP exchange of this protocol is answered: NV-Status with everything, 200 or 400, text or bytes or JSON.

Called by `http` and `http_control`.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qsl

from google.protobuf import json_format

from headrace.api.v1.texts import many_lines
from headrace.core.errors import Unavailable
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, OK_EMPTY, OK_JSON, OK_PLAIN, ResponseHead

STATUS_FIELD = b"nv-status"

OK_BINARY = ResponseHead(200, [(CONTENT_TYPE, b"application/octet-stream")])
BAD_BINARY = ResponseHead(400, [(CONTENT_TYPE, b"application/octet-stream")])
BAD = ResponseHead(400)

_WRITTEN_AT_ONCE = 8 * 1024
"""Text takes about 3 ms for so many bytes of a message; that of a larger one is written in another thread."""


def query_value(exchange: Exchange, name: str) -> str:
    """A value of the query, the first where it is repeated; "" if it is not there."""
    pairs = parse_qsl(exchange.head.query.decode("latin-1"), keep_blank_values=True)
    return next((value for key, value in pairs if key == name), "")


def answer_empty(exchange: Exchange, status: bytes, *, good: bool) -> None:
    """An answer that has nothing to say but whether; `status` is the text of NV-Status, here and below."""
    exchange.respond(OK_EMPTY if good else BAD, b"", ((STATUS_FIELD, status),))


def answer_message(exchange: Exchange, status: bytes, message: Any) -> None:
    """Success, with a message in the form that the query asks for: text, unless it says `binary` or `json`."""
    form = query_value(exchange, "format")
    extra = ((STATUS_FIELD, status),)
    if form == "binary":
        exchange.respond(OK_BINARY, message.SerializeToString(), extra)
        return
    head, write = (OK_JSON, _json) if form == "json" else (OK_PLAIN, many_lines)
    if message.ByteSize() <= _WRITTEN_AT_ONCE:
        exchange.respond(head, write(message), extra)
        return

    def written(text: asyncio.Future[bytes]) -> None:
        if text.cancelled():
            exchange.fail(Unavailable("the server is stopping"))
        elif (error := text.exception()) is not None:
            exchange.fail(error)
        else:
            exchange.respond(head, text.result(), extra)

    asyncio.get_running_loop().run_in_executor(None, write, message).add_done_callback(written)


def _json(message: Any) -> bytes:
    return json_format.MessageToJson(message, preserving_proto_field_name=True).encode()
