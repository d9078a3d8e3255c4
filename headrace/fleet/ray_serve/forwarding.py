# SPDX-License-Identifier: Apache-2.0
"""Forward one HTTP request to the server of a replica, and stream both bodies.

Bodies are streamed: at most twice `_BUFFER_BYTES` of a response are buffered. Each request has its own connection, so a
failure is never that of an idle connection which the server had closed.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

import aiohttp
from yarl import URL

from headrace.core.errors import DeadlineExceeded, Unavailable
from headrace.fleet.local.container_command import ADDRESS

_BUFFER_BYTES = 64 * 1024
_CONNECT_SECONDS = 5.0
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Header fields of one connection (RFC 9110, 7.6.1), which the other connection has of its own."""
_OF_PROXY = frozenset({"date", "server"})
"""Fields of responses that Ray's proxy adds itself."""
_ANSWERED = "expect"
"""Not forwarded: Ray's proxy has already answered `Expect: 100-continue`."""

Fields = list[tuple[str, str]]


@dataclass(frozen=True)
class ForwardRequest:
    """One request, without the prefix of its service."""

    method: str
    target: str
    """Path and query, percent-encoded as the client sent them."""
    headers: Fields
    body: AsyncIterable[bytes] | None
    """None: there is no body."""


@dataclass(frozen=True)
class ForwardResponse:
    """A response: its head, and a stream of its body."""

    status: int
    headers: Fields
    body: ResponseBody


class ResponseBody(AsyncIterator[bytes]):
    """Stream of a response's body. Close it, even after its end."""

    def __init__(self, response: aiohttp.ClientResponse, request_seconds: float) -> None:
        self._response = response
        self._request_seconds = request_seconds

    async def __anext__(self) -> bytes:
        """Return the next piece. Raises Unavailable or DeadlineExceeded if the response ends before it is complete."""
        try:
            chunk = await self._response.content.readany()
        except TimeoutError:
            raise deadline_error(self._request_seconds) from None
        except aiohttp.ClientError:
            raise ended_error() from None
        if not chunk:
            raise StopAsyncIteration
        return chunk

    def close(self) -> None:
        """Close the connection, unless the response is complete: the server then stops working on it."""
        self._response.close()


class Forwarder:
    """Connections to one server. Used in one event loop."""

    def __init__(self, port: int, request_seconds: float = 0.0) -> None:
        """request_seconds: maximum duration of a request; 0: unlimited."""
        self._origin = f"http://{ADDRESS}:{port}"
        self._request_seconds = request_seconds
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=request_seconds or None, sock_connect=_CONNECT_SECONDS),
            auto_decompress=False,
            read_bufsize=_BUFFER_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def send(self, request: ForwardRequest) -> ForwardResponse:
        """Send a request; return its response once the head has arrived.

        Raises Unavailable if the server has ended, DeadlineExceeded after `request_seconds`.
        """
        try:
            response = await self._session.request(
                request.method,
                URL(self._origin + request.target, encoded=True),
                headers=[field for field in without_hop_by_hop(request.headers) if field[0].lower() != _ANSWERED],
                data=request.body,
                allow_redirects=False,
            )
        except TimeoutError:
            raise deadline_error(self._request_seconds) from None
        except aiohttp.ClientError:
            raise ended_error() from None
        headers = without_hop_by_hop(response.headers.items())
        headers = [field for field in headers if field[0].lower() not in _OF_PROXY]
        return ForwardResponse(response.status, headers, ResponseBody(response, self._request_seconds))

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


def deadline_error(request_seconds: float) -> DeadlineExceeded:
    """Return the error of a request that took too long."""
    if not request_seconds:
        return DeadlineExceeded("the server of this replica did not accept a connection in time; try again")
    return DeadlineExceeded(
        f"the request took longer than {request_seconds:g} seconds, the timeoutSeconds of the service"
    )


def ended_error() -> Unavailable:
    """Return the error of a request whose server has ended."""
    return Unavailable(
        "the server of this replica has ended; Ray replaces the replica, try again", retry_after_seconds=1
    )


def without_hop_by_hop(headers: Iterable[tuple[str, str]]) -> Fields:
    """Return header fields without those of the connection, nor those that its `Connection` field names."""
    fields = list(headers)
    connection_fields = {
        option.strip().lower() for name, value in fields if name.lower() == "connection" for option in value.split(",")
    }
    return [(name, value) for name, value in fields if name.lower() not in _HOP_BY_HOP | connection_fields]


def target_of(scope: Mapping[str, object]) -> str:
    """Return path and query of an ASGI scope, without the prefix under which Ray Serve mounts the service."""
    raw, prefix, query = scope.get("raw_path"), scope.get("root_path"), scope.get("query_string")
    path = raw.decode("latin-1").partition("?")[0] if isinstance(raw, bytes) and raw else _quoted(scope.get("path"))
    mounted = prefix.rstrip("/") if isinstance(prefix, str) else ""
    if mounted and (path == mounted or path.startswith(f"{mounted}/")):
        path = path[len(mounted) :]
    path = path if path.startswith("/") else f"/{path}"
    return f"{path}?{query.decode('latin-1')}" if isinstance(query, bytes) and query else path


def _quoted(path: object) -> str:
    return quote(path if isinstance(path, str) else "/", safe="/:@!$&'()*+,;=~-._")
