# SPDX-License-Identifier: Apache-2.0
"""Download parts of objects with `splice`: the kernel moves the bytes from the socket to the file.

For stores behind plain HTTP, such as those in one's own rack: a gigabyte takes a third of the CPU time. With TLS there
is nothing to gain. On any irregularity it stops, and obstore continues, with its retries and errors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from headrace.core.limits import MIB
from headrace.models.storage.credentials import BucketKeys
from headrace.models.storage.locations import ObjectLocation
from headrace.models.storage.partial_files import write_at

log = logging.getLogger("headrace.storage")

LEAST_BYTES = MIB
"""Minimum size of a part."""
_AT_ONCE = MIB
_HEAD_BYTES = 64 * 1024
_GOOD_FOR = timedelta(days=1)
_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
_NO_SPLICE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without splice."""
_RANGE = re.compile(rb"\r\ncontent-range:[ \t]*bytes (\d+)-(\d+)/", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_ETAG = re.compile(rb"\r\netag:[ \t]*([^\r\n]*?)[ \t]*\r\n", re.IGNORECASE)
_OTHERWISE = re.compile(rb"\r\n(transfer-encoding|content-encoding):", re.IGNORECASE)


def splicer_for(store: Any, place: ObjectLocation, keys: BucketKeys | None, idle_seconds: float) -> Splicer | None:
    """Return a splicer for a store; None if it is not suitable."""
    # Without keys, signing would mean searching for credentials, possibly at another service.
    if keys is None or not keys.access_key or place.cloud == "gcp" or not hasattr(os, "splice"):
        return None
    if not keys.endpoint_url.lower().startswith("http://") or any(os.environ.get(name) for name in _PROXIES):
        return None
    return Splicer(store, idle_seconds)


class Splicer:
    """Splices from one store. Thread-safe."""

    def __init__(self, store: Any, idle_seconds: float) -> None:
        self._store = store
        self._seconds = idle_seconds
        self._idle: list[socket.socket] = []
        self._works = True
        """False once this store or file system turned out to be unsuitable."""

    def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop().close()

    def part(
        self,
        key: str,
        etag: str,
        file: int,
        start: int,
        end: int,
        heard: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> int:
        """Write bytes of an object into a file; return how many. Raises OSError if the file cannot be written."""
        if not self._works or end - start < LEAST_BYTES:
            return start
        sock: socket.socket | None = None
        at = start
        try:
            sock, early = self._asked(key, etag, start, end)
        except Exception as error:  # Exceptions of obstore, of which there are many, and of the network.
            log.debug("a part is not spliced: %s", type(error).__name__)
            self._works = not isinstance(error, _NotForThis)
            return start
        whole = False
        try:
            write_at(file, early, at)
            at += len(early)
            heard(len(early))
            at = self._moved(sock, file, at, end, heard, stopped)
            whole = at == end
        finally:
            if whole:
                self._idle.append(sock)
            else:
                sock.close()
        return at

    def _asked(self, key: str, etag: str, start: int, end: int) -> tuple[socket.socket, bytes]:
        """Return a connection on which the bytes arrive, and those that came with the head."""
        import obstore

        parts = urlsplit(obstore.sign(self._store, "GET", key, _GOOD_FOR))
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        lines = [f"GET {target} HTTP/1.1", f"Host: {parts.netloc}", f"Range: bytes={start}-{end - 1}"]
        lines += ["Accept-Encoding: identity", "User-Agent: headrace"]
        if etag:
            lines.append(f"If-Match: {etag}")
        request = "\r\n".join((*lines, "", "")).encode("ascii")
        for used in (True, False):
            sock = self._idle.pop() if used and self._idle else self._connected(parts.hostname or "", parts.port or 80)
            try:
                sock.sendall(request)
                head, early = _read_head(sock)
                if head:
                    _check(head, etag, start, end, len(early))
                    return sock, early
            except ConnectionError:
                pass
            except BaseException:
                sock.close()
                raise
            sock.close()  # An idle connection may have been closed meanwhile: try a new one.
        raise ConnectionError("the store closed the connection")

    def _connected(self, host: str, port: int) -> socket.socket:
        sock = socket.create_connection((host, port), min(self._seconds, 10.0))
        # Blocking, with a time limit in the kernel: splice ignores Python's.
        sock.settimeout(None)
        limit = struct.pack("ll", int(self._seconds), int(self._seconds % 1 * 1e6) or 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return sock

    def _moved(
        self,
        sock: socket.socket,
        file: int,
        at: int,
        end: int,
        heard: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> int:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _AT_ONCE)
            while at < end and not stopped():
                try:
                    come = os.splice(sock.fileno(), writing, min(_AT_ONCE, end - at), flags=os.SPLICE_F_MOVE)
                except OSError as error:
                    log.debug("a part is cut off: %s", error)
                    return at
                if not come:
                    return at
                while come:
                    try:
                        count = os.splice(reading, file, come, offset_dst=at, flags=os.SPLICE_F_MOVE)
                    except OSError as error:
                        if error.errno not in _NO_SPLICE:
                            raise
                        self._works = False
                        piece = os.read(reading, come)
                        write_at(file, piece, at)
                        count = len(piece)
                    come, at = come - count, at + count
                    heard(count)
                if not self._works:
                    return at
            return at
        finally:
            os.close(reading)
            os.close(writing)


class _NotForThis(Exception):
    """Raised when the store answers in a way that splice cannot use."""


def _read_head(sock: socket.socket) -> tuple[bytes, bytes]:
    """Read the head of an answer, and what came with it; empty if the connection was closed."""
    text = b""
    while (end := text.find(b"\r\n\r\n")) < 0:
        piece = sock.recv(_HEAD_BYTES)
        if not piece and not text:
            return b"", b""
        text += piece
        if not piece or len(text) > 2 * _HEAD_BYTES:
            raise _NotForThis
    return text[: end + 4], text[end + 4 :]


def _check(head: bytes, etag: str, start: int, end: int, early: int) -> None:
    """Raise if an answer cannot be spliced."""
    said, length, tag = _RANGE.search(head), _LENGTH.search(head), _ETAG.search(head)
    fits = (
        head.startswith(b"HTTP/1.1 206 ")
        and said is not None
        and (int(said[1]), int(said[2])) == (start, end - 1)
        and length is not None
        and int(length[1]) == end - start
        and early <= end - start
        and _OTHERWISE.search(head) is None
        and (not etag or tag is None or tag[1].strip(b'"') == etag.strip('"').encode())
    )
    if not fits:
        raise _NotForThis
