# SPDX-License-Identifier: Apache-2.0
"""Connections on blocking sockets, and how coroutines that only use these are run without a loop. For `client`."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from headrace.client.addresses import Address
from headrace.client.retrying import Deadline
from headrace.core.tensors import Buffer

T = TypeVar("T")

CONNECT_SECONDS = 10.0
"""A host that does not answer at all is given up after this."""
_RECEIVE_BYTES = 64 * 1024
_JOIN_BYTES = 64 * 1024
"""Smaller requests are joined: one call and one packet are cheaper than a few."""


def to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise RuntimeError("a blocking client came upon something that waits for a loop")


class BlockingLine:
    """See `lines.Line`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def send(self, buffers: Sequence[Buffer], deadline: Deadline) -> None:
        """See `Line.send`."""
        if sum(map(len, buffers)) <= _JOIN_BYTES:
            buffers = [b"".join(buffers)]
        try:
            for buffer in buffers:
                self._sock.settimeout(deadline.left())
                self._sock.sendall(buffer)
        except TimeoutError as error:
            raise deadline.told(error) from None

    async def receive(self, deadline: Deadline) -> bytes:
        """See `Line.receive`."""
        self._sock.settimeout(deadline.left())
        try:
            return self._sock.recv(_RECEIVE_BYTES)
        except TimeoutError as error:
            raise deadline.told(error) from None

    async def fill(self, view: memoryview, deadline: Deadline) -> int:
        """See `Line.fill`."""
        position = 0
        try:
            while position < len(view):
                self._sock.settimeout(deadline.left())
                received = self._sock.recv_into(view[position:])
                if not received:
                    break
                position += received
        except TimeoutError as error:
            raise deadline.told(error) from None
        return position

    def is_stale(self) -> bool:
        """See `Line.is_stale`."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """See `Line.close`."""
        self._sock.close()


class BlockingLines:
    """See `lines.Lines`."""

    async def connect(self, address: Address, tls: ssl.SSLContext | None, deadline: Deadline) -> BlockingLine:
        """See `Lines.connect`."""
        left = deadline.left()
        patience = CONNECT_SECONDS if left is None else min(CONNECT_SECONDS, left)
        try:
            sock = socket.create_connection((address.host, address.port), patience)
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
        return BlockingLine(sock)

    async def sleep(self, seconds: float) -> None:
        """See `Lines.sleep`."""
        time.sleep(seconds)  # noqa: ASYNC251 - never run by a loop
