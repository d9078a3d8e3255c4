# SPDX-License-Identifier: Apache-2.0
"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`. Used by every handler of this room.

The statuses are those that OpenAI's clients act upon: they try again after 408, 409, 429 and anything from 500, so what will
stay wrong is a 400 here even where another protocol has a status of its own for it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from math import ceil

import orjson

from headrace.core.errors import INTERNAL_TEXT, Code, HeadraceError, InvalidArgument, NotFound
from headrace.core.ids import REQUEST_ID_FIELD, request_id
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import CONTENT_TYPE, JSON, Fields, ResponseHead
from headrace.net.http.status import HTTP_STATUS

log = logging.getLogger("headrace.api")

_FIELD = re.compile(r"'?([a-z_]+)'?")
_WRONG, _OURS = "invalid_request_error", "server_error"
_KINDS: dict[Code, tuple[int, str, str | None]] = {
    Code.UNAUTHENTICATED: (401, _WRONG, "invalid_api_key"),
    Code.PERMISSION_DENIED: (403, _WRONG, "permission_denied"),
    Code.NOT_FOUND: (404, _WRONG, "not_found"),
    Code.FAILED_PRECONDITION: (400, _WRONG, None),
    Code.UNIMPLEMENTED: (400, _WRONG, "unsupported"),
    Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    Code.DEADLINE_EXCEEDED: (504, _OURS, "timeout"),
    Code.UNAVAILABLE: (503, _OURS, "unavailable"),
    Code.INTERNAL: (500, _OURS, None),
}
"""Status, type and code; what is not here has the status of every protocol and is the request's own fault."""


class Refused(InvalidArgument):
    """A request that is wrong, and where: `messages[0].content[1].image_url`."""

    def __init__(self, param: str, message: str, reason: str | None = None) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param = param
        self.reason = reason
        """What OpenAI calls the code."""


class ModelNotFound(NotFound):
    """No model, and no adapter of a model, has this name."""

    param = "model"
    reason = "model_not_found"


def about(error: BaseException, names: Mapping[str, str]) -> BaseException:
    """What a backend says of a field, said of the member of the request: `names` has these by the fields' names."""
    if not isinstance(error, InvalidArgument) or isinstance(error, Refused):
        return error
    field = _FIELD.match(error.message)
    if field is None or field[1] not in names:
        return error
    param = names[field[1]]
    told = Refused("", param + error.message[field.end() :])
    told.param = param
    return told


def error_json(error: BaseException) -> tuple[int, bytes]:
    """Status and body. An exception that is not ours says nothing of itself."""
    if not isinstance(error, HeadraceError):
        return 500, _body(INTERNAL_TEXT, _OURS, None, None)
    status, kind, code = _KINDS.get(error.code) or (HTTP_STATUS[error.code], _WRONG, None)
    return status, _body(error.message, kind, getattr(error, "param", None), getattr(error, "reason", None) or code)


def fail(exchange: Exchange, error: BaseException) -> None:
    """Answer an error, or cut the response if it has begun. What is not ours goes to the log."""
    extra: Fields = ()
    if not isinstance(error, HeadraceError):
        found_by = request_id(exchange.head.get(REQUEST_ID_FIELD.encode()))
        details = {"request_id": found_by, "path": exchange.head.path.decode("latin-1"), "peer": exchange.peer}
        log.error("a request failed", exc_info=error, extra=details)
        extra = ((REQUEST_ID_FIELD.encode(), found_by.encode()),)
    elif error.retry_after_seconds is not None:
        extra = ((b"retry-after", b"%d" % max(1, ceil(error.retry_after_seconds))),)
    if exchange.started:
        exchange.abort()
        return
    status, body = error_json(error)
    exchange.respond(ResponseHead(status, [(CONTENT_TYPE, JSON)]), body, extra)


class Told:
    """A handler whose errors are told in this shape; also those of a guard before it, if the guard asks for `fail`."""

    __slots__ = ("_handler",)

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __call__(self, exchange: Exchange) -> None:
        """Handle one request."""
        try:
            self._handler(exchange)
        except Exception as error:
            fail(exchange, error)

    def fail(self, exchange: Exchange, error: BaseException) -> None:
        """Tell an error that came up before the handler."""
        fail(exchange, error)


def _body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    # A message may quote what a client sent; what is no text in it must not become an error in the error.
    text = message.encode(errors="replace").decode()
    return orjson.dumps({"error": {"message": text, "type": kind, "param": param or None, "code": code}})
