# SPDX-License-Identifier: Apache-2.0
"""Errors in TAO's shape: `{"error_desc", "error_code"}`. Used by every handler of this room."""

from __future__ import annotations

import logging
from math import ceil

import orjson

from headrace.core.errors import INTERNAL_TEXT, Code, HeadraceError
from headrace.core.ids import REQUEST_ID_FIELD, request_id
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, JSON, Field, ResponseHead
from headrace.net.http.status import HTTP_STATUS

log = logging.getLogger("headrace.api")

ANY, FORBIDDEN = 1, 2
"""What TAO has for `error_code`."""
_MOST_CHARACTERS = 1000


def error_json(message: str, code: int = ANY) -> bytes:
    """The body of an error."""
    # A message may quote what a client sent; what is no text in it must not become an error in the error.
    text = message[:_MOST_CHARACTERS].encode(errors="replace").decode()
    return orjson.dumps({"error_desc": text, "error_code": code})


def fail(exchange: Exchange, error: BaseException) -> None:
    """Answer an error, or cut the response if it has begun. What is not ours goes to the log."""
    extra: list[Field] = []
    if isinstance(error, HeadraceError):
        status, text = HTTP_STATUS[error.code], error.message
        if error.retry_after_seconds is not None:
            extra.append((b"retry-after", b"%d" % max(1, ceil(error.retry_after_seconds))))
    else:
        found_by = request_id(exchange.head.get(REQUEST_ID_FIELD.encode()))
        details = {"request_id": found_by, "path": exchange.head.path.decode("latin-1"), "peer": exchange.peer}
        log.error("a request failed", exc_info=error, extra=details)
        status, text = 500, INTERNAL_TEXT
        extra.append((REQUEST_ID_FIELD.encode(), found_by.encode()))
    if exchange.started:
        exchange.abort()
        return
    if status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    code = FORBIDDEN if isinstance(error, HeadraceError) and error.code is Code.PERMISSION_DENIED else ANY
    exchange.respond(json_head(status), error_json(text, code), extra)


def json_head(status: int) -> ResponseHead:
    """The head of a JSON answer."""
    return _HEADS.get(status) or ResponseHead(status, [(CONTENT_TYPE, JSON)])


_HEADS = {
    status: ResponseHead(status, [(CONTENT_TYPE, JSON)])
    for status in (200, 201, 202, 404, 405, 503, *HTTP_STATUS.values())
}
