# SPDX-License-Identifier: Apache-2.0
"""A loopback proxy that restricts the object-store client to the endpoint that a user named.

The client (obstore) follows redirects and has no option against it: a user's own store could send the server to a cloud's
metadata service, or to any address inside the operator's network. So where a user names the endpoint, the client gets this
proxy. It connects to that host and port only, at an address that it has checked, and answers 403 to everything else.
With TLS the proxy sees encrypted bytes only; the client checks the certificate as usual.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
from base64 import b64encode
from urllib.parse import urlsplit

from headrace.models.storage.http_download import addresses_of, is_metadata_service
from headrace.models.storage.locations import parse_web_url

log = logging.getLogger("headrace.storage")

_HEAD_BYTES = 64 * 1024
_HEAD_SECONDS = 30.0
_CONNECT_SECONDS = 10.0
_PIECE_BYTES = 256 * 1024
_DROPPED = (b"proxy-authorization:", b"proxy-connection:", b"connection:")

Target = tuple[str, int]


def proxy_url(endpoint: str) -> str:
    """Return the URL of a proxy to this endpoint. Raises InvalidArgument if the endpoint is not a URL, and OSError."""
    at = parse_web_url(endpoint)
    with _lock:
        proxy = _of_process.get(os.getpid())
        if proxy is None:
            _of_process.clear()  # a child of a process that has one
            proxy = _of_process[os.getpid()] = EndpointProxy()
        return proxy.register((at.host, at.port))


class EndpointProxy:
    """A forward proxy in a thread of its own, for as long as the process runs."""

    def __init__(self) -> None:
        self._targets: dict[bytes, Target] = {}
        """The endpoint of each user name. Only clients that got one from us know it."""
        self._names: dict[Target, str] = {}
        self._serving: set[asyncio.Task[None] | None] = set()
        """Tasks of connections. asyncio itself keeps no reference to one whose client has disconnected."""
        # Bound here, served there: the caller may run an event loop itself.
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._port = listener.getsockname()[1]
        serving = self._serve_forever(listener)
        threading.Thread(target=asyncio.run, args=(serving,), name="headrace-endpoint-proxy", daemon=True).start()

    def register(self, target: Target) -> str:
        """Return the URL through which a client reaches this target. Not thread-safe."""
        name = self._names.get(target)
        if name is None:
            name = self._names[target] = secrets.token_hex(16)
            self._targets[b"Basic " + b64encode(f"{name}:".encode())] = target
        return f"http://{name}@127.0.0.1:{self._port}"

    async def _serve_forever(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._serve, sock=listener, limit=_HEAD_BYTES)
        await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._serving.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            try:
                async with asyncio.timeout(_HEAD_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                await self._forward(head, reader, writer)
            finally:
                writer.close()
                self._serving.discard(task)

    async def _forward(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request, *fields = head[:-4].split(b"\r\n")
        method, target, version = request.split(b" ", 2)
        requested = _requested(method, target)
        allowed = self._targets.get(_credentials(fields))
        if allowed is None or requested != allowed:
            # On a redirect to another host, the client leaves its credentials out.
            log.warning("a redirect of an object store to %a was refused", target[:200].decode("latin-1"))
            writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
            return
        try:
            back, forth = await _connect(*allowed)
        except OSError:
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
            return
        if method == b"CONNECT":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            # One request for each connection, so that each is checked: both ends close after the response.
            origin = urlsplit(target)
            path = (origin.path or b"/") + (b"?" + origin.query if origin.query else b"")
            forwarded = [field for field in fields if not field.lower().startswith(_DROPPED)]
            forth.write(b"\r\n".join([b" ".join((method, path, version)), *forwarded, b"connection: close", b"", b""]))
        directions = [asyncio.ensure_future(_relay(reader, forth)), asyncio.ensure_future(_relay(back, writer))]
        try:
            # The endpoint ends its side after the response, and a client that ends its side has disconnected.
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            forth.close()


def _requested(method: bytes, target: bytes) -> Target | None:
    """Return the host and port of a request to a proxy."""
    try:
        parts = urlsplit((b"//" + target if method == b"CONNECT" else target).decode("ascii"))
        default_port = 443 if method == b"CONNECT" else 80
        return ((parts.hostname or "").removesuffix("."), parts.port or default_port)
    except ValueError:
        return None


def _credentials(fields: list[bytes]) -> bytes:
    for field in fields:
        name, _, value = field.partition(b":")
        if name.lower() == b"proxy-authorization":
            return value.strip()
    return b""


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a host at an address that was checked: the name is not resolved again. Raises OSError."""
    addresses = await asyncio.to_thread(addresses_of, host, port)
    failure = OSError(f"{host} has no address where an object store can be")
    for address in addresses:
        if is_metadata_service(address):
            continue
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return await asyncio.open_connection(str(address), port, limit=_PIECE_BYTES)
        except (OSError, TimeoutError) as error:
            failure = OSError(str(error))
    raise failure


async def _relay(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    """Pass bytes on until the source ends."""
    while piece := await source.read(_PIECE_BYTES):
        to.write(piece)
        await to.drain()


_lock = threading.Lock()
_of_process: dict[int, EndpointProxy] = {}
