# SPDX-License-Identifier: Apache-2.0
"""Serves saved KV pages to decode servers on other machines, over TCP. Created by `connector` for the role prefill.

Each connection carries one request and one response:

    decode    "HRKV" 1   id: 16 bytes   first page, count: 4 bytes each   nonce: 16 bytes   proof: 32 bytes
    prefill   status: 1 byte   length: 8 bytes   proof: 32 bytes, over the nonce too   the pages

Numbers are big-endian. The proofs are HMACs with the key that all servers of a fleet share: the client's shows that it may
read the pages, the server's that it belongs to the fleet. The pages are not encrypted: see the guide.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO

from headrace.backends.llm.kv_transfer.page_store import PageStore, StoredPages
from headrace.core.errors import FailedPrecondition
from headrace.core.kv_transfer import signature

log = logging.getLogger("headrace.backends.llm")

REQUEST = struct.Struct(">4sB16sII16s32s")
RESPONSE = struct.Struct(">BQ32s")
MAGIC, VERSION = b"HRKV", 1
OK, EXPIRED, REFUSED = 0, 1, 2
_MAX_CONNECTIONS = 8
"""Decode servers served at the same time; others wait in the socket's backlog."""
_BACKLOG = 128
_REQUEST_SECONDS = 5.0
"""For the whole request, so that a client that sends a byte at a time does not block others for long."""
_SEND_SECONDS = 30.0
"""Maximum time that a client may stop reading."""
_SWEEP_SECONDS = 1.0


def request_proof(key: bytes, id: bytes, first: int, count: int, nonce: bytes) -> bytes:
    """Return the proof that a client may read these pages."""
    return bytes.fromhex(signature(key, b"take", id, b"%d" % first, b"%d" % count, nonce))


def response_proof(key: bytes, status: int, length: int, nonce: bytes) -> bytes:
    """Return the proof that a response comes from a server with the key, and answers this request."""
    return bytes.fromhex(signature(key, b"give", b"%d" % status, b"%d" % length, nonce))


class PageSender:
    """Accepts connections in a thread, which also evicts expired pages from the store."""

    def __init__(
        self, store: PageStore, key: bytes, host: str, port: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._key = key
        self._clock = clock
        self._socket = _listen(host, port)
        self._socket.settimeout(_SWEEP_SECONDS)
        self.port: int = self._socket.getsockname()[1]
        self._closed = False
        self._connections: set[socket.socket] = set()
        """Open connections, served or waiting for a thread."""
        self._threads = ThreadPoolExecutor(_MAX_CONNECTIONS, thread_name_prefix="llm kv sender")
        self._free = threading.Semaphore(_MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._accept_loop, name="llm kv sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections at once: a client that does not read must not delay shutdown."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread before the descriptor can be reused
        self._thread.join()
        self._socket.close()
        for connection in tuple(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown(cancel_futures=True)
        for connection in self._connections:
            connection.close()

    def _accept_loop(self) -> None:
        while not self._closed:
            self._store.evict_expired(self._clock())
            # Accept only what can be served: each connection takes a file descriptor of the server.
            if self._free.acquire(timeout=_SWEEP_SECONDS) and not self._accept():
                self._free.release()

    def _accept(self) -> bool:
        """Pass the next connection to a thread; return whether there was one."""
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return False
        except OSError:
            if not self._closed:
                log.warning("Could not accept a connection from a decode server.")
                time.sleep(_SWEEP_SECONDS)  # probably too many open files
            return False
        self._connections.add(connection)
        self._threads.submit(self._serve, connection)
        return True

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._respond(connection)
            except OSError as error:
                log.debug("A decode server closed its connection: %s", error)
            except Exception:
                log.exception("KV pages could not be sent to a decode server.")
        self._connections.discard(connection)
        self._free.release()

    def _respond(self, connection: socket.socket) -> None:
        request = read_exactly(connection, REQUEST.size, time.monotonic() + _REQUEST_SECONDS)
        magic, version, pages_id, first, count, nonce, proof = REQUEST.unpack(request)
        expected = request_proof(self._key, pages_id, first, count, nonce)
        if magic != MAGIC or version != VERSION or not hmac.compare_digest(proof, expected):
            self._send_status(connection, REFUSED, 0, nonce)
            return
        connection.settimeout(_SEND_SECONDS)
        opened = self._store.open(pages_id.hex(), self._clock())
        if opened is None:
            self._send_status(connection, EXPIRED, 0, nonce)
            return
        descriptor, stored = opened
        with FileIO(descriptor) as stream:
            if count:
                self._send_pages(connection, stream, stored, first, count, nonce)
            else:  # the client needs no page
                self._send_status(connection, OK, 0, nonce)
        self._store.remove(stored.id)

    def _send_pages(
        self, connection: socket.socket, stream: FileIO, stored: StoredPages, first: int, count: int, nonce: bytes
    ) -> None:
        size = stored.bytes // stored.pages
        begin, end = first * size, (first + count) * size
        if end > stored.bytes:
            self._send_status(connection, EXPIRED, 0, nonce)
            return
        self._send_status(connection, OK, end - begin, nonce)
        connection.sendfile(stream, begin, end - begin)

    def _send_status(self, connection: socket.socket, status: int, length: int, nonce: bytes) -> None:
        connection.sendall(RESPONSE.pack(status, length, response_proof(self._key, status, length, nonce)))


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises FailedPrecondition."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        try:
            return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not ipaddress.ip_address(address[0]).is_loopback:
                raise
            # On loopback no firewall rule depends on the port, and transfer tokens carry it.
            log.warning("Port %d of %s is in use; using another one.", port, host)
            return socket.create_server((address[0], 0), family=family, backlog=_BACKLOG)
    except OSError:
        raise FailedPrecondition(
            f"--handing-address {host}:{port} cannot be listened on: name a free port of this machine"
        ) from None


def read_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Read `count` bytes. Raises as `read_into`."""
    data = bytearray(count)
    read_into(connection, memoryview(data), deadline)
    return bytes(data)


def read_into(connection: socket.socket, view: memoryview, deadline: float) -> None:
    """Fill `view`. Raises ConnectionError if the peer closes early, TimeoutError at the deadline (`time.monotonic`).

    One deadline for all reads: with a timeout per read, a trickle of bytes could last forever.
    """
    while view:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other side closed the connection")
        view = view[count:]
