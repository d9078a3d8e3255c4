# SPDX-License-Identifier: Apache-2.0
"""Download parts of objects with `splice`: the kernel moves the bytes from the socket to the file.

For stores with plain HTTP, such as those in the same rack: a gigabyte takes a third of the CPU time. With TLS there
is no gain. On any error it stops and obstore continues, with its own retries and errors.
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

MIN_PART_BYTES = MIB
"""Minimum size of a part."""
_PIPE_BYTES = MIB
_HEAD_BYTES = 64 * 1024
_SIGNATURE_LIFETIME = timedelta(days=1)
_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
_NO_SPLICE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without splice."""
_RANGE = re.compile(rb"\r\ncontent-range:[ \t]*bytes (\d+)-(\d+)/", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_ETAG = re.compile(rb"\r\netag:[ \t]*([^\r\n]*?)[ \t]*\r\n", re.IGNORECASE)
_ENCODED = re.compile(rb"\r\n(transfer-encoding|content-encoding):", re.IGNORECASE)


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
        self._supported = True
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
        report_bytes: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> int:
        """Write bytes of an object into a file; return how many. Raises OSError if the file cannot be written."""
        if not self._supported or end - start < MIN_PART_BYTES:
            return start
        sock: socket.socket | None = None
        position = start
        try:
            sock, first_bytes = self._request(key, etag, start, end)
        except Exception as error:  # obstore raises many kinds of exceptions.
            log.debug("not splicing a part: %s", type(error).__name__)
            self._supported = not isinstance(error, _Unsupported)
            return start
        complete = False
        try:
            write_at(file, first_bytes, position)
            position += len(first_bytes)
            report_bytes(len(first_bytes))
            position = self._transfer(sock, file, position, end, report_bytes, stopped)
            complete = position == end
        finally:
            if complete:
                self._idle.append(sock)
            else:
                sock.close()
        return position

    def _request(self, key: str, etag: str, start: int, end: int) -> tuple[socket.socket, bytes]:
        """Send the request; return its connection, and the body bytes that arrived with the head."""
        import obstore

        parts = urlsplit(obstore.sign(self._store, "GET", key, _SIGNATURE_LIFETIME))
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        lines = [f"GET {target} HTTP/1.1", f"Host: {parts.netloc}", f"Range: bytes={start}-{end - 1}"]
        lines += ["Accept-Encoding: identity", "User-Agent: headrace"]
        if etag:
            lines.append(f"If-Match: {etag}")
        request = "\r\n".join((*lines, "", "")).encode("ascii")
        for reuse in (True, False):
            sock = self._idle.pop() if reuse and self._idle else self._connect(parts.hostname or "", parts.port or 80)
            try:
                sock.sendall(request)
                head, first_bytes = _read_head(sock)
                if head:
                    _check_head(head, etag, start, end, len(first_bytes))
                    return sock, first_bytes
            except ConnectionError:
                pass
            except BaseException:
                sock.close()
                raise
            sock.close()  # An idle connection may have been closed meanwhile: try a new one.
        raise ConnectionError("the store closed the connection")

    def _connect(self, host: str, port: int) -> socket.socket:
        sock = socket.create_connection((host, port), min(self._seconds, 10.0))
        # Blocking, with a time limit in the kernel: splice ignores Python's.
        sock.settimeout(None)
        limit = struct.pack("ll", int(self._seconds), int(self._seconds % 1 * 1e6) or 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return sock

    def _transfer(
        self,
        sock: socket.socket,
        file: int,
        position: int,
        end: int,
        report_bytes: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> int:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            while position < end and not stopped():
                try:
                    pending = os.splice(
                        sock.fileno(), writing, min(_PIPE_BYTES, end - position), flags=os.SPLICE_F_MOVE
                    )
                except OSError as error:
                    log.debug("a part was interrupted: %s", error)
                    return position
                if not pending:
                    return position
                while pending:
                    try:
                        count = os.splice(reading, file, pending, offset_dst=position, flags=os.SPLICE_F_MOVE)
                    except OSError as error:
                        if error.errno not in _NO_SPLICE:
                            raise
                        self._supported = False
                        piece = os.read(reading, pending)
                        write_at(file, piece, position)
                        count = len(piece)
                    pending, position = pending - count, position + count
                    report_bytes(count)
                if not self._supported:
                    return position
            return position
        finally:
            os.close(reading)
            os.close(writing)


class _Unsupported(Exception):
    """Raised for a response that splice cannot use."""


def _read_head(sock: socket.socket) -> tuple[bytes, bytes]:
    """Read the head of a response and the bytes after it; empty if the connection was closed."""
    text = b""
    while (end := text.find(b"\r\n\r\n")) < 0:
        piece = sock.recv(_HEAD_BYTES)
        if not piece and not text:
            return b"", b""
        text += piece
        if not piece or len(text) > 2 * _HEAD_BYTES:
            raise _Unsupported
    return text[: end + 4], text[end + 4 :]


def _check_head(head: bytes, etag: str, start: int, end: int, first_bytes: int) -> None:
    """Raise if a response cannot be spliced."""
    content_range, length, response_etag = _RANGE.search(head), _LENGTH.search(head), _ETAG.search(head)
    fits = (
        head.startswith(b"HTTP/1.1 206 ")
        and content_range is not None
        and (int(content_range[1]), int(content_range[2])) == (start, end - 1)
        and length is not None
        and int(length[1]) == end - start
        and first_bytes <= end - start
        and _ENCODED.search(head) is None
        and (not etag or response_etag is None or response_etag[1].strip(b'"') == etag.strip('"').encode())
    )
    if not fits:
        raise _Unsupported
