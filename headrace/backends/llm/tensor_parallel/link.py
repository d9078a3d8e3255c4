# SPDX-License-Identifier: Apache-2.0
"""The connection between the first rank and another: frames of a kind and bytes, over a stream socket.

rank                first rank
HELLO (versions) -->
                 <-- SETUP (what to load)
SIZED (what fits) ->
                 <-- CONNECT (what all use, where they meet)
READY            -->
                 <-- STEP ...           until one of them closes the connection
ERROR (a reason) -->                    at any time; the rank ends then

Between node 0 and the server of another node (see `node_pool` and `node_worker`), over TCP:

node R              node 0
JOIN (which node)-->
                 <-- START (a rank) ... each followed by
STARTED (or why not) -->                and a connection of its own, which becomes that of the rank
ENDED (a rank, how) -->
                 <-- KILL (a rank), KEEP (these are in the group)
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
from collections.abc import Collection, Mapping
from contextlib import suppress
from enum import IntEnum
from time import monotonic
from typing import Any

_HEAD = struct.Struct("<IB")
_MOST_BYTES = 64 << 20
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 5, 5, 3
"""A machine that has lost its power says nothing: after some 20 seconds the kernel closes the connection."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    SETUP = 2
    SIZED = 3
    CONNECT = 4
    READY = 5
    STEP = 6
    ERROR = 7
    ADOPT = 8
    """To a spare process: use the connection that comes with this frame from now on."""
    JOIN = 9
    START = 10
    STARTED = 11
    ENDED = 12
    KILL = 13
    KEEP = 14


class LinkClosed(Exception):
    """The other side has closed the connection, or has ended."""


class LinkTimeout(Exception):
    """Nothing came in time."""


class Link:
    """One end of a connection. One thread sends and one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()
        self._sockets: list[socket.socket] | None = None
        """Connections that came with frames, if they are expected."""
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 if it is closed."""
        return self._sock.fileno()

    def send(self, kind: Kind, payload: bytes) -> None:
        """Send a frame. Raises `LinkClosed`, or `LinkTimeout` if the other side does not read."""
        try:
            self._sock.sendall(_HEAD.pack(len(payload), kind) + payload)
        except TimeoutError:
            raise LinkTimeout from None
        except OSError:
            raise LinkClosed from None

    def send_json(self, kind: Kind, content: Mapping[str, Any]) -> None:
        """Send a frame with a JSON object."""
        self.send(kind, json.dumps(content).encode())

    def receive(self, timeout_seconds: float | None = None) -> tuple[Kind, bytes]:
        """Return the next frame. Raises `LinkClosed` or `LinkTimeout`."""
        deadline = None if timeout_seconds is None else monotonic() + timeout_seconds
        self._fill(_HEAD.size, deadline)
        size, kind = _HEAD.unpack_from(self._received)
        if size > _MOST_BYTES or kind not in Kind.__members__.values():
            self.close()
            raise LinkClosed
        self._fill(_HEAD.size + size, deadline)
        payload = bytes(self._received[_HEAD.size : _HEAD.size + size])
        del self._received[: _HEAD.size + size]
        return Kind(kind), payload

    def send_link(self, link: Link) -> None:
        """Give another connection to the process at the other end of a UNIX socket, and close it here.

        Raises `LinkClosed`.
        """
        received = bytes(link._received)  # this process may have read the beginning of the next frame
        try:
            socket.send_fds(self._sock, [_HEAD.pack(len(received), Kind.ADOPT) + received], [link.fileno()])
        except OSError:
            raise LinkClosed from None
        finally:
            link.close()

    def expect_socket(self) -> None:
        """Accept connections that come with frames. Costs time with each frame."""
        self._sockets = []

    def expect_no_socket(self) -> None:
        """Undo `expect_socket`."""
        self._sockets = None

    def take_link(self, received: bytes) -> Link:
        """Return the connection that came with an ADOPT frame, whose payload is given. Raises `LinkClosed` without one."""
        if not self._sockets:
            raise LinkClosed
        sock = self._sockets.pop()
        sock.setblocking(True)  # the process that has opened it has used it with timeouts
        link = Link(sock)
        link._received += received
        return link

    @property
    def is_local(self) -> bool:
        """Whether the other side is a process that has inherited its end."""
        return self._sock.family == socket.AF_UNIX

    @property
    def local_host(self) -> str:
        """Return this side's address of a TCP connection."""
        return host_of(self._sock.getsockname())

    @property
    def peer_host(self) -> str:
        """Return the other side's address of a TCP connection."""
        return host_of(self._sock.getpeername())

    def shut_down(self) -> None:
        """End the connection for both sides, also for a thread that reads from it; `close` frees it."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def set_timeout(self, seconds: float | None) -> None:
        """Bound how long `send` waits for the other side."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def _fill(self, count: int, deadline: float | None) -> None:
        while len(self._received) < count:
            try:
                if deadline is not None:
                    self._sock.settimeout(max(0.001, deadline - monotonic()))
                data = self._read()
            except TimeoutError:
                raise LinkTimeout from None
            except OSError:
                raise LinkClosed from None
            if not data:
                raise LinkClosed
            self._received += data

    def _read(self) -> bytes:
        if self._sockets is None:
            return self._sock.recv(65536)
        data, descriptors, _, _ = socket.recv_fds(self._sock, 65536, 1)
        self._sockets += [socket.socket(fileno=descriptor) for descriptor in descriptors]
        return data


def host_of(address: Any) -> str:
    """Return the host of the address of a TCP socket."""
    return str(address[0]).removeprefix("::ffff:")  # IPv4 at a socket for both


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel close a TCP connection whose other side does not answer any more."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (_IDLE_SECONDS + _PROBES * _PROBE_SECONDS) * 1000)


def keep_alive_to(hosts: Collection[str]) -> int:
    """Do so for all connections of this process to these hosts, also those of libraries; return how many there are."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it has no other side, or has been closed meanwhile
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and host_of(sock.getpeername()) in hosts:
                    keep_alive(sock)
                    count += 1
    return count


def read_json(payload: bytes) -> dict[str, Any]:
    """Return the JSON object of a frame. Raises `LinkClosed` if it is none."""
    try:
        content = json.loads(payload)
    except ValueError:
        raise LinkClosed from None
    if not isinstance(content, dict):
        raise LinkClosed
    return content
