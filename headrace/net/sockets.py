# SPDX-License-Identifier: Apache-2.0
"""Addresses and listening sockets: TCP over IPv4 and IPv6, and UNIX paths.

Called by `server.HttpServer` and, for a port that several processes share, by programs. TCP_NODELAY is not set here:
uvloop sets it on every TCP transport, accepted or adopted (`tests/net/test_server.py` checks that).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import stat
import struct
from dataclasses import dataclass, replace
from typing import Any

from headrace.core.errors import FailedPrecondition, InvalidArgument

BACKLOG = 2048
"""Connections that the kernel completes before we accept them; it limits this to net.core.somaxconn."""

_FIRST_INHERITED = 3  # SD_LISTEN_FDS_START
_UNIX_PATH_BYTES = 107  # sockaddr_un.sun_path is 108 with its final zero
_FORMS = "write 127.0.0.1:8000, [::1]:8000 or unix:/path (0.0.0.0:8000 listens on every interface)"

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; the socket module has no name for it
_DROP_SYN = struct.pack(
    "=HBBIHBBIHBBIHBBI",
    *(0x30, 0, 0, 13),  # load byte 13 of the TCP header: the flags
    *(0x45, 0, 1, 0x02),  # if SYN is set, go on; else skip one
    *(0x06, 0, 0, 0),  # drop
    *(0x06, 0, 0, 0xFFFFFFFF),  # keep
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen: `host` and `port`, or `path` for a UNIX socket."""

    host: str = ""
    port: int = 0
    """0 lets the kernel choose a port."""
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `127.0.0.1:8000`, `[::1]:8000`, `name:8000` or `unix:/path`."""
        if text.startswith("unix:"):
            return cls(path=_checked_path(text))
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise InvalidArgument(f"address {text!r}: an IPv6 address needs brackets; {_FORMS}")
        if not colon or not host:
            raise InvalidArgument(f"address {text!r} has no host; {_FORMS}")
        if not (port.isascii() and port.isdigit() and int(port) < 65536):
            raise InvalidArgument(f"address {text!r}: the port must be a number from 0 to 65535; {_FORMS}")
        return cls(host, int(port))

    def __str__(self) -> str:
        """Return the text that `parse` accepts."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Listener:
    """A bound, listening, non-blocking socket. It outlives the asyncio server, so that its backlog is never lost."""

    def __init__(self, address: Address, *, reuse_port: bool = False, unix_mode: int = 0o600) -> None:
        self.address = address
        """As requested, but with the port that the kernel chose."""
        self._inode: tuple[int, int] | None = None
        self._shared = False
        """Whether the process that started this one also holds the socket, and will pass it to the next process."""
        if address.path:
            if reuse_port:
                raise InvalidArgument(f"{address} cannot be shared by several processes; use one process or a TCP port")
            self._socket = _bind_unix(address)
            os.chmod(address.path, unix_mode)  # before listen: no client can have connected yet
            self._inode = _inode(address.path)
        else:
            inherited = None if reuse_port else _inherited(address)
            self._shared = inherited is not None
            self._socket = inherited or _bind_tcp(address, reuse_port=reuse_port)
            self.address = replace(address, port=self._socket.getsockname()[1])
        self._socket.setblocking(False)
        try:
            self._socket.listen(BACKLOG)
        except OSError as error:  # two sockets may bind one port with SO_REUSEADDR; only one may listen
            self.close()
            raise _explained(address, error) from None

    def duplicate(self) -> socket.socket:
        """Return another descriptor of the same socket, for an asyncio server to own and close."""
        return self._socket.dup()

    def fileno(self) -> int:
        """Return the descriptor, to pass to a process that accepts from it."""
        return self._socket.fileno()

    def refuse_new(self) -> bool:
        """Accept no new TCP handshake. Return True if handshakes in progress may still reach the backlog.

        A client whose handshake ends between the last accept and the close of a TCP socket would be reset. A filter that
        drops SYN packets prevents that: the client's kernel retries a second later, and finds another process on the same
        port or a refusal. For a UNIX socket, unlinking its path is enough.
        """
        if self.address.path:
            self._unlink()
            return False
        if self._shared:
            return False  # new connections are for the next process
        program = ctypes.create_string_buffer(_DROP_SYN, len(_DROP_SYN))
        try:
            self._socket.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(_DROP_SYN) // 8, ctypes.addressof(program))
            )
        except OSError:  # not Linux, or a sandbox without socket filters: microseconds of risk remain
            return False
        return True

    def accept_backlog(self) -> list[socket.socket]:
        """Accept, without waiting, every connection that the kernel has completed."""
        accepted: list[socket.socket] = []
        while True:
            try:
                accepted.append(self._socket.accept()[0])
            except (ConnectionAbortedError, InterruptedError):
                continue
            except OSError:  # EAGAIN: no more connections; EMFILE: no more descriptors
                return accepted

    def close(self) -> None:
        """Stop listening; remove the UNIX path if this process still owns it."""
        self._unlink()
        self._socket.close()

    def _unlink(self) -> None:
        if self._inode is not None and _inode(self.address.path) == self._inode:
            with contextlib.suppress(OSError):
                os.unlink(self.address.path)
        self._inode = None


def reserve_port(address: Address) -> tuple[Address, socket.socket]:
    """Bind, without listening, the TCP port that several processes will share; call it before they are forked.

    The port stays reserved as long as the socket is open. SO_REUSEPORT would let a second server of the same user join
    silently and take half of the requests, so a port on which another process listens already is rejected here.
    """
    if address.path:
        raise InvalidArgument(f"{address} cannot be shared by several processes; use one process or a TCP port")
    if address.port:
        probe = _bind_tcp(address, reuse_port=False)
        try:
            probe.listen(1)
        except OSError as error:
            raise _explained(address, error) from None
        finally:
            probe.close()
    reserved = _bind_tcp(address, reuse_port=True)
    return replace(address, port=reserved.getsockname()[1]), reserved


def _inherited(address: Address) -> socket.socket | None:
    """Return the socket of this address that this process inherited by systemd's protocol (LISTEN_FDS)."""
    count = os.environ.get("LISTEN_FDS", "")
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return None
    _, sockaddr = _resolved(address)
    for descriptor in range(_FIRST_INHERITED, _FIRST_INHERITED + int(count)):
        with contextlib.suppress(OSError):  # closed, or not a socket
            sock = socket.socket(fileno=descriptor)
            if sock.getsockname() == sockaddr and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.set_inheritable(False)
                return sock
            sock.detach()
    return None


def _resolved(address: Address) -> tuple[socket.AddressFamily, Any]:
    try:
        infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError:
        raise InvalidArgument(f"address {address}: the host name does not resolve; {_FORMS}") from None
    # A name such as localhost may have both families; a listener has one, and most clients try IPv4.
    family, _, _, _, sockaddr = min(infos, key=lambda info: info[0] != socket.AF_INET)
    return family, sockaddr


def _bind_tcp(address: Address, *, reuse_port: bool) -> socket.socket:
    family, sockaddr = _resolved(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:  # [::] means every address, IPv4 included, whatever the machine's default
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(sockaddr)
    except OSError as error:
        sock.close()
        raise _explained(address, error) from None
    return sock


def _bind_unix(address: Address) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(address.path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _remove_stale(address.path):
                raise
            sock.bind(address.path)
    except OSError as error:
        sock.close()
        raise _explained(address, error) from None
    return sock


def _remove_stale(path: str) -> bool:
    """Remove a socket file that no process listens on; leave anything else alone."""
    try:
        before = os.lstat(path)
        if not stat.S_ISSOCK(before.st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            if probe.connect_ex(path) != errno.ECONNREFUSED or _inode(path) != (before.st_dev, before.st_ino):
                return False
        os.unlink(path)
    except FileNotFoundError:
        return True
    return True


def _inode(path: str) -> tuple[int, int] | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _checked_path(text: str) -> str:
    path = text.removeprefix("unix:")
    if path.startswith("//"):  # unix:///path, as gRPC clients write it
        path = "/" + path.lstrip("/")
    if not path or "\0" in path:
        raise InvalidArgument(f"address {text!r} has no path; {_FORMS}")
    if len(os.fsencode(path)) > _UNIX_PATH_BYTES:
        raise InvalidArgument(f"address {text!r}: the path is over {_UNIX_PATH_BYTES} bytes; use a shorter one")
    return path


def _explained(address: Address, error: OSError) -> FailedPrecondition:
    """Return an error with the address and what to do next."""
    advice = {
        errno.EADDRINUSE: "it is in use already; stop the program that listens there or choose another port "
        f"(`ss -ltnp 'sport = :{address.port}'` names the program)",
        errno.EADDRNOTAVAIL: "this machine has no such address; use 127.0.0.1, or one that `ip address` shows",
        errno.EACCES: "permission denied; choose a port from 1024 up",
    }
    if address.path:
        advice = {
            errno.EADDRINUSE: "the path is in use: another server answers there, or it is not a socket; "
            "stop that server, or choose another path",
            errno.ENOENT: "its directory does not exist; make it first",
            errno.EACCES: "permission denied; choose a directory this user may write to",
        }
    reason = advice.get(error.errno or 0, error.strerror or "the kernel refused")
    return FailedPrecondition(f"cannot listen on {address}: {reason}")
