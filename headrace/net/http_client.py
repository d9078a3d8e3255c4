# SPDX-License-Identifier: Apache-2.0
"""The HTTP client of control traffic: small requests to servers that an operator or a driver has named.

One request per connection, on `http.client`; it blocks, and `run_in_thread` is for event loops. It follows no redirect and
uses no proxy, because requests have credentials, and it limits the size of responses. URLs that clients send are fetched
by `models.storage.http_download`, which checks their addresses.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import SplitResult, urlsplit

from headrace.core.errors import InvalidArgument
from headrace.core.limits import MIB

_CONNECT_SECONDS = 10.0
T = TypeVar("T")


class HttpError(ConnectionError):
    """The request cannot be sent as HTTP, or the response is not HTTP, too long or cut off."""


class HttpResponse(NamedTuple):
    """A response that was read to its end."""

    status: int
    headers: Mapping[str, str]
    """By name in lower case."""
    content: bytes

    def json(self) -> Any:
        """Return the decoded body; None if it is not JSON."""
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError):
            return None


def request(
    method: str,
    url: str,
    path: str = "",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    seconds: float,
    max_bytes: int = 64 * MIB,
) -> HttpResponse:
    """Send a request and read the response; blocks. Raises OSError without a response, InvalidArgument for a bad URL."""
    with HttpCall(url, seconds, headers) as call:
        return read(call.send(method, path, body), max_bytes)


async def run_in_thread(call: HttpCall, work: Callable[[], T]) -> T:
    """Run blocking work with a call and close it; a cancellation cuts the connection, so that the thread ends."""
    import asyncio  # imported here: commands that only use `request` start quicker without it

    def run() -> T:
        with call:
            return work()

    try:
        return await asyncio.to_thread(run)
    except asyncio.CancelledError:
        call.cut()
        raise


def parse_server_url(url: str) -> SplitResult:
    """Split the URL of a server. Raises InvalidArgument."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise InvalidArgument(f"{url[:200]!a}: the port must be a number from 0 to 65535") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgument(f"{url[:200]!a} is not a server URL: write http://127.0.0.1:8000")
    return parts


def error_text(error: OSError) -> str:
    """Return why there is no response, for a message."""
    return error.strerror or str(error) or type(error).__name__


class HttpCall:
    """One request and its response, on a connection of its own. Leaving the context closes it."""

    def __init__(self, url: str, seconds: float, headers: Mapping[str, str] | None = None) -> None:
        """`url`: its path is the prefix of all paths; its query is sent too. Raises InvalidArgument."""
        self._parts = parts = parse_server_url(url)
        self._seconds = seconds
        self._headers = dict(headers or {})
        self._response: http.client.HTTPResponse | None = None
        self._connection: http.client.HTTPConnection
        connect_seconds = min(seconds, _CONNECT_SECONDS)
        if parts.scheme == "https":
            self._connection = http.client.HTTPSConnection(
                parts.hostname or "", parts.port, timeout=connect_seconds, context=ssl.create_default_context()
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=connect_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()
        if isinstance(error, http.client.HTTPException | UnicodeError):
            raise HttpError(f"it does not speak HTTP ({type(error).__name__})") from error

    def send(self, method: str, path: str = "", body: bytes | None = None) -> http.client.HTTPResponse:
        """Send the request; return the response, whose body is not read yet."""
        target = (self._parts.path.rstrip("/") + path) or "/"
        if self._parts.query:
            target += f"?{self._parts.query}"
        headers = self._headers | ({"content-type": "application/json"} if body else {})
        try:
            self._connection.connect()
        except TimeoutError:
            raise ConnectionError(f"no connection within {self._connection.timeout:g} s") from None
        self._connection.sock.settimeout(self._seconds)
        self._connection.request(method, target, body, headers)
        self._response = self._connection.getresponse()
        return self._response

    def cut(self) -> None:
        """Shut the connection down from another thread: reads and writes fail at once."""
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def read(response: http.client.HTTPResponse, max_bytes: int) -> HttpResponse:
    """Read a response to its end. Raises HttpError for one that is longer, or was cut off."""
    content = response.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise HttpError(f"it sent more than {max_bytes} bytes")
    if response.length:
        raise HttpError("it closed the connection before the end of its response")
    return HttpResponse(response.status, {name.lower(): value for name, value in response.getheaders()}, content)
