# SPDX-License-Identifier: Apache-2.0
"""One HTTP request to a service, with http.client in a thread.

It follows no redirect and uses no proxy: the address comes from a driver. The response is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from headrace.core.errors import InvalidArgument

MAX_BYTES = 1 << 30
"""A video is base64 in one JSON response."""
_MAX_SMALL = 1 << 20
_CONNECT_SECONDS = 10.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Response:
    """The response of a service."""

    status: int
    body: Mapping[str, Any]
    """The JSON object; {} if it is none."""
    text: str = ""
    """The body, if it is no JSON object."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By name in lower case."""

    @property
    def error_type(self) -> str:
        """`error.type`; "" if there is none."""
        error = self.body.get("error")
        return str(error.get("type") or "") if isinstance(error, Mapping) else ""

    @property
    def message(self) -> str:
        """The error message, wherever it is; "" if there is none."""
        error = self.body.get("error")
        detail = error.get("message") if isinstance(error, Mapping) else error
        return str(detail or self.body.get("message") or self.text[:500])[:2000]


async def get(url: str, path: str, seconds: float, headers: Mapping[str, str] | None = None) -> Response | None:
    """Send a GET; return None if there is no answer."""
    call = HttpCall(url, seconds, headers)
    try:
        return await run_in_thread(call, lambda: read_response(call.send("GET", path, None), _MAX_SMALL))
    except (OSError, http.client.HTTPException):
        return None


async def run_in_thread(call: HttpCall, work: Callable[[], T]) -> T:
    """Run blocking work; a cancellation cuts the connection, so that the thread ends."""

    def run() -> T:
        try:
            return work()
        finally:
            call.close()

    try:
        return await asyncio.to_thread(run)
    except asyncio.CancelledError:
        call.cut()
        raise


class HttpCall:
    """One request and its response, on a connection of its own."""

    def __init__(self, url: str, seconds: float, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidArgument(f"{url[:200]!a} is not the URL of a service")
        self._seconds = seconds
        self._headers = dict(headers or {})
        self._response: http.client.HTTPResponse | None = None
        self._prefix = parts.path.rstrip("/")
        connect_seconds = min(seconds, _CONNECT_SECONDS)
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            self._connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=connect_seconds, context=ssl.create_default_context()
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=connect_seconds)

    def send(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        """Send the request; return the response, whose body is not read yet."""
        headers = self._headers | ({"content-type": "application/json"} if body is not None else {})
        self._connection.connect()
        self._connection.sock.settimeout(self._seconds)
        self._connection.request(method, self._prefix + path, body, headers)
        self._response = self._connection.getresponse()
        return self._response

    def cut(self) -> None:
        """Shut the connection down from another thread: reads and writes fail at once."""
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


def read_response(response: http.client.HTTPResponse, max_bytes: int = MAX_BYTES) -> Response:
    """Read a response to its end."""
    raw = response.read(max_bytes)
    headers = {name.lower(): value for name, value in response.getheaders()}
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        return Response(response.status, document, "", headers)
    return Response(response.status, {}, raw.decode(errors="replace"), headers)
