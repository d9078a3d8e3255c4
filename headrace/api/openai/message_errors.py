# SPDX-License-Identifier: Apache-2.0
"""Errors of the Messages API in Anthropic's shape: `{"type": "error", "error": {"type", "message"}, "request_id"}`.

A request is translated to a chat request, so an error may name a member of that; `with_client_path` names the member that
the client sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from headrace.api.openai.errors import BadRequest, http_status, log_unexpected, retry_fields
from headrace.core.errors import INTERNAL_TEXT, HeadraceError
from headrace.core.names import REQUEST_ID_FIELD, request_id
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, JSON, Fields, ResponseHead

ERROR_TYPES: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error type by HTTP status. Any other error of the client is an invalid request."""


class ThreadsUnsupported(BadRequest):
    """The request uses a conversation that the server keeps. Clients that get this code send the whole conversation."""

    error_code = "thread_unsupported_request"


def message_request_id(exchange: Exchange) -> str:
    """Return the request id of a response: the client's own, or a new one."""
    return request_id(exchange.head.get(REQUEST_ID_FIELD.encode()))


def id_field(id: str) -> Fields:
    """Return the response header with the request id."""
    return ((b"request-id", id.encode()),)


def with_client_path(error: BaseException, paths: Mapping[str, str]) -> BaseException:
    """Return an error about a member of the chat request as an error about the client's member.

    `paths` maps paths of the chat request to the client's paths; the longest one that fits is used.
    """
    if not isinstance(error, BadRequest) or not error.message.startswith(error.param):
        return error
    end = len(error.param)
    while end > 0:
        known = paths.get(error.param[:end])
        if known is not None:
            path = known + error.param[end:]
            renamed = BadRequest("", path + error.message[len(error.param) :])
            renamed.param = path
            return renamed
        end = max(error.param.rfind(".", 0, end), error.param.rfind("[", 0, end))
    return error


def error_json(error: BaseException, id: str) -> tuple[int, bytes]:
    """Return status and body. An unexpected exception does not show its message."""
    status = http_status(error)
    kind = ERROR_TYPES.get(status) or ERROR_TYPES[400 if status < 500 else 500]
    message = error.message if isinstance(error, HeadraceError) else INTERNAL_TEXT
    # A message may quote the request; invalid UTF-8 in it must not raise another error.
    text = message.encode(errors="replace").decode()
    document: dict[str, Any] = {"type": kind, "message": text}
    if isinstance(error, ThreadsUnsupported):
        document["details"] = {"error_code": error.error_code}
    return status, orjson.dumps({"type": "error", "error": document, "request_id": id})


def fail(exchange: Exchange, error: BaseException, id: str = "") -> None:
    """Respond with an error, or abort the response if it has started. Log an unexpected exception."""
    identity = id or message_request_id(exchange)
    extra = (*id_field(identity), *retry_fields(error))
    if not isinstance(error, HeadraceError):
        log_unexpected(exchange, error, identity)
        extra = (*extra, (REQUEST_ID_FIELD.encode(), identity.encode()))  # as on every other path
    if exchange.started:
        exchange.abort()
        return
    status, body = error_json(error, identity)
    exchange.respond(ResponseHead(status, [(CONTENT_TYPE, JSON)]), body, extra)
