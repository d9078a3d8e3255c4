# SPDX-License-Identifier: Apache-2.0
"""Addresses, and connections on blocking sockets.

`Connection` and `Network` are the interface that HTTP uses. They are implemented here for blocking sockets and in
`asyncio_sockets` for asyncio.
"""

from __future__ import annotations

import re
import select
import socket
import ssl
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from headrace.client.retries import Deadline
from headrace.core.errors import InvalidArgument
from headrace.core.tensors import Buffer

_PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 8001}
_HEADRACE_PORT = 8000
_URL_HINT = "write http://host:8000, https://host, grpc://host:8001 or grpcs://host:8001"
_INVALID_CHARACTER = re.compile(r"[^\x21-\x7e]")


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address."""

    scheme: str
    host: str
    port: int
    prefix: str
    """The path before `/v2`, behind a proxy; "" for none."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse a URL; without a scheme it is HTTP, at port 8000."""
        if not isinstance(url, str) or _INVALID_CHARACTER.search(url):
            raise InvalidArgument(f"{str(url)[:200]!a} is not a server address: {_URL_HINT}")
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise InvalidArgument(f"{url}: the port must be a number from 0 to 65535") from None
        if parts.scheme not in _PORTS:
            raise InvalidArgument(f"{url}: '{parts.scheme}' is not spoken here: {_URL_HINT}")
        if not parts.hostname:
            raise InvalidArgument(f"{url} names no host: {_URL_HINT}")
        if parts.username is not None or parts.query or parts.fragment:
            raise InvalidArgument(f"{url}: an address has no user, '?' or '#'; give a token with token=...")
        if parts.scheme.startswith("grpc") and parts.path.strip("/"):
            raise InvalidArgument(f"{url}: an address for gRPC has no path")
        default_port = _PORTS[parts.scheme] if "://" in url else _HEADRACE_PORT
        actual_port = default_port if port is None else port
        return cls(parts.scheme, parts.hostname, actual_port, parts.path.rstrip("/"))

    @property
    def secure(self) -> bool:
        """Whether it uses TLS."""
        return self.scheme in ("https", "grpcs")

    @property
    def is_grpc(self) -> bool:
        """Whether it uses gRPC."""
        return self.scheme in ("grpc", "grpcs")

    @property
    def authority(self) -> str:
        """Host and port, as in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        """Return the URL."""
        return f"{self.scheme}://{self.authority}{self.prefix}"


class Connection(Protocol):
    """One connection. Raises `OSError` when it breaks, `DeadlineExceeded` when the time is over."""

    async def send(self, buffers: Sequence[Buffer], deadline: Deadline) -> None:
        """Send all buffers."""

    async def receive(self, deadline: Deadline) -> bytes:
        """Return received bytes; b"" at the end of the connection."""

    async def fill(self, view: memoryview, deadline: Deadline) -> int:
        """Receive until a buffer is full or the connection ends; return the number of bytes."""

    def is_stale(self) -> bool:
        """Return whether an idle connection is unusable: closed by the server, or with unexpected data."""

    def close(self) -> None:
        """Close the connection at once."""


class Network(Protocol):
    """Opens connections and sleeps."""

    async def connect(self, address: Address, tls: ssl.SSLContext | None, deadline: Deadline) -> Connection:
        """Connect, with TLS if a context is given."""

    async def sleep(self, seconds: float) -> None:
        """Sleep."""


T = TypeVar("T")

CONNECT_SECONDS = 10.0
"""Timeout for connecting."""
_RECEIVE_BYTES = 64 * 1024
_JOIN_BYTES = 64 * 1024
"""Buffers of smaller requests are joined, to send them with one call in one packet."""


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise RuntimeError("a coroutine of the blocking client suspended")


class BlockingConnection:
    """A `Connection` on a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def send(self, buffers: Sequence[Buffer], deadline: Deadline) -> None:
        """Send all buffers."""
        if sum(map(len, buffers)) <= _JOIN_BYTES:
            buffers = [b"".join(buffers)]
        try:
            for buffer in buffers:
                self._sock.settimeout(deadline.left())
                self._sock.sendall(buffer)
        except TimeoutError as error:
            raise deadline.error_for(error) from None

    async def receive(self, deadline: Deadline) -> bytes:
        """Return received bytes."""
        self._sock.settimeout(deadline.left())
        try:
            return self._sock.recv(_RECEIVE_BYTES)
        except TimeoutError as error:
            raise deadline.error_for(error) from None

    async def fill(self, view: memoryview, deadline: Deadline) -> int:
        """Fill a buffer."""
        position = 0
        try:
            while position < len(view):
                self._sock.settimeout(deadline.left())
                received = self._sock.recv_into(view[position:])
                if not received:
                    break
                position += received
        except TimeoutError as error:
            raise deadline.error_for(error) from None
        return position

    def is_stale(self) -> bool:
        """Return whether an idle connection is unusable."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class BlockingNetwork:
    """A `Network` of blocking sockets."""

    async def connect(self, address: Address, tls: ssl.SSLContext | None, deadline: Deadline) -> BlockingConnection:
        """Connect, with TLS if a context is given."""
        left = deadline.left()
        timeout = CONNECT_SECONDS if left is None else min(CONNECT_SECONDS, left)
        try:
            sock = socket.create_connection((address.host, address.port), timeout)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if tls is not None:
                    sock = tls.wrap_socket(sock, server_hostname=address.host)
            except BaseException:
                sock.close()
                raise
        except TimeoutError:
            deadline.left()
            raise
        return BlockingConnection(sock)

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)  # noqa: ASYNC251 - never run by a loop
