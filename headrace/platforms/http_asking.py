# SPDX-License-Identifier: Apache-2.0
"""One HTTP request to a service, by http.client in threads. Used by `readiness` and `asking`.

Follows no redirect and uses no proxy: the address is one that a driver gave. What is read is bounded.
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

MOST_BYTES = 1 << 30
"""A video comes as base64 in one JSON."""
_MOST_SMALL = 1 << 20
_CONNECT_SECONDS = 10.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Told:
    """An answer."""

    status: int
    body: Mapping[str, Any]
    """{} where it is no JSON object."""
    text: str = ""
    """What came, where it is no JSON object."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By their names in lower case."""

    @property
    def error_type(self) -> str:
        """`error.type`; "" where there is none."""
        error = self.body.get("error")
        return str(error.get("type") or "") if isinstance(error, Mapping) else ""

    @property
    def message(self) -> str:
        """The words for people, wherever they are; "" where there are none."""
        error = self.body.get("error")
        found = error.get("message") if isinstance(error, Mapping) else error
        return str(found or self.body.get("message") or self.text[:500])[:2000]


async def get(url: str, path: str, seconds: float, headers: Mapping[str, str] | None = None) -> Told | None:
    """None where nobody answers."""
    call = Call(url, seconds, headers)
    try:
        return await in_thread(call, lambda: told_of(call.send("GET", path, None), _MOST_SMALL))
    except (OSError, http.client.HTTPException):
        return None


async def in_thread(call: Call, work: Callable[[], T]) -> T:
    """Do what blocks; whoever is cancelled meanwhile cuts the connection, and the thread ends."""

    def whole() -> T:
        try:
            return work()
        finally:
            call.close()

    try:
        return await asyncio.to_thread(whole)
    except asyncio.CancelledError:
        call.cut()
        raise


class Call:
    """One request and its response, on a connection of its own."""

    def __init__(self, url: str, seconds: float, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidArgument(f"{url[:200]!a} is no address of a service")
        self._seconds = seconds
        self._headers = dict(headers or {})
        self._response: http.client.HTTPResponse | None = None
        self._prefix = parts.path.rstrip("/")
        connecting = min(seconds, _CONNECT_SECONDS)
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            self._connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=connecting, context=ssl.create_default_context()
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=connecting)

    def send(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        """Send it; the response's body is still to be read."""
        headers = self._headers | ({"content-type": "application/json"} if body is not None else {})
        self._connection.connect()
        self._connection.sock.settimeout(self._seconds)
        self._connection.request(method, self._prefix + path, body, headers)
        self._response = self._connection.getresponse()
        return self._response

    def cut(self) -> None:
        """From another thread: whoever reads or writes there fails now."""
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


def told_of(response: http.client.HTTPResponse, most_bytes: int = MOST_BYTES) -> Told:
    """Read it to its end."""
    raw = response.read(most_bytes)
    headers = {name.lower(): value for name, value in response.getheaders()}
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return Told(response.status, found, "", headers)
    return Told(response.status, {}, raw.decode(errors="replace"), headers)
