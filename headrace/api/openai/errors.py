# SPDX-License-Identifier: Apache-2.0
"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

OpenAI's clients retry after 408, 409, 429 and any status from 500, so an error that retries cannot fix is a 400 here, even
where another protocol has a more specific status.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from math import ceil

import orjson

from headrace.core.errors import INTERNAL_TEXT, Code, HeadraceError, InvalidArgument, NotFound
from headrace.core.names import REQUEST_ID_FIELD, request_id
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import CONTENT_TYPE, HTTP_STATUS, JSON, Fields, ResponseHead

log = logging.getLogger("headrace.api")

_FIELD = re.compile(r"'?([a-z_]+)'?")
_CLIENT, _SERVER = "invalid_request_error", "server_error"
_KINDS: dict[Code, tuple[int, str, str | None]] = {
    Code.UNAUTHENTICATED: (401, _CLIENT, "invalid_api_key"),
    Code.PERMISSION_DENIED: (403, _CLIENT, "permission_denied"),
    Code.NOT_FOUND: (404, _CLIENT, "not_found"),
    Code.FAILED_PRECONDITION: (400, _CLIENT, None),
    Code.UNIMPLEMENTED: (400, _CLIENT, "unsupported"),
    Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    Code.DEADLINE_EXCEEDED: (504, _SERVER, "timeout"),
    Code.UNAVAILABLE: (503, _SERVER, "unavailable"),
    Code.INTERNAL: (500, _SERVER, None),
}
"""Status, type and code. Any other error has the usual HTTP status and is a client error."""


class BadRequest(InvalidArgument):
    """An invalid request; `param` says where: `messages[0].content[1].image_url`."""

    def __init__(self, param: str, message: str, reason: str | None = None) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param = param
        self.reason = reason
        """OpenAI's `code`."""


class ModelNotFound(NotFound):
    """No model and no adapter has this name."""

    param = "model"
    reason = "model_not_found"


def rename_field(error: BaseException, names: Mapping[str, str]) -> BaseException:
    """Return a backend's error about a field as an error about the request's member: `names` maps fields to members."""
    if not isinstance(error, InvalidArgument) or isinstance(error, BadRequest):
        return error
    field = _FIELD.match(error.message)
    if field is None or field[1] not in names:
        return error
    param = names[field[1]]
    renamed = BadRequest("", param + error.message[field.end() :])
    renamed.param = param
    return renamed


def http_status(error: BaseException) -> int:
    """Return the HTTP status of an error."""
    return _kind(error.code)[0] if isinstance(error, HeadraceError) else 500


def _kind(code: Code) -> tuple[int, str, str | None]:
    return _KINDS.get(code) or (HTTP_STATUS[code], _CLIENT, None)


def error_json(error: BaseException) -> tuple[int, bytes]:
    """Return status and body. An unexpected exception does not show its message."""
    if not isinstance(error, HeadraceError):
        return 500, _body(INTERNAL_TEXT, _SERVER, None, None)
    status, kind, code = _kind(error.code)
    return status, _body(error.message, kind, getattr(error, "param", None), getattr(error, "reason", None) or code)


def fail(exchange: Exchange, error: BaseException) -> None:
    """Respond with an error, or abort the response if it has started. Log an unexpected exception."""
    extra = retry_fields(error)
    if not isinstance(error, HeadraceError):
        found_id = request_id(exchange.head.get(REQUEST_ID_FIELD.encode()))
        log_unexpected(exchange, error, found_id)
        extra = ((REQUEST_ID_FIELD.encode(), found_id.encode()),)
    if exchange.started:
        exchange.abort()
        return
    status, body = error_json(error)
    exchange.respond(ResponseHead(status, [(CONTENT_TYPE, JSON)]), body, extra)


def log_unexpected(exchange: Exchange, error: BaseException, id: str) -> None:
    """Log an exception that is a fault of the server, under the request id."""
    details = {"request_id": id, "path": exchange.head.path.decode("latin-1"), "peer": exchange.peer}
    log.error("request failed", exc_info=error, extra=details)


def retry_fields(error: BaseException) -> Fields:
    """Return the response header that says when to try again, if the error knows."""
    if not isinstance(error, HeadraceError) or error.retry_after_seconds is None:
        return ()
    return ((b"retry-after", b"%d" % max(1, ceil(error.retry_after_seconds))),)


class OpenAiHandler:
    """A handler whose errors have OpenAI's shape, also those of a guard before it, which calls `fail`."""

    __slots__ = ("_handler", "_respond_error")

    def __init__(self, handler: Handler, respond_error: Callable[[Exchange, BaseException], None] = fail) -> None:
        """`respond_error` is for a protocol with another shape of errors."""
        self._handler = handler
        self._respond_error = respond_error

    def __call__(self, exchange: Exchange) -> None:
        """Handle a request."""
        try:
            self._handler(exchange)
        except Exception as error:
            self._respond_error(exchange, error)

    def fail(self, exchange: Exchange, error: BaseException) -> None:
        """Respond with an error that was raised before the handler."""
        self._respond_error(exchange, error)


def _body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    # A message may quote the request; invalid UTF-8 in it must not raise another error.
    text = message.encode(errors="replace").decode()
    return orjson.dumps({"error": {"message": text, "type": kind, "param": param or None, "code": code}})
