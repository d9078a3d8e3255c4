# SPDX-License-Identifier: Apache-2.0
"""The disk level of the KV cache: one file a page, the least recently used removed first, kept when the server restarts.

    FOLDER/lock                         held by the instance that uses the folder
    FOLDER/<fingerprint>-<hash>.kv      a header and the bytes of a page

The fingerprint is that of the weights, adapters, page layout and version: files with another one are left alone until their
space is needed. A file is written under another name and renamed, and has a checksum: what was cut off or damaged is
removed when it is read. Threads write and read; the engine's thread asks what there is.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.core.errors import FailedPrecondition
from headrace.core.files import FileLock, remove_temporary_files, write_atomically

log = logging.getLogger("headrace.backends.llm")

_MAGIC, _VERSION = b"HRKV", 1
_HEADER = struct.Struct(">4sI16s16sQI")
"""Magic, version, fingerprint, hash of the page, bytes of the page, CRC-32 of the bytes."""
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.kv", re.ASCII)
_READ_THREADS = 4
_QUEUED_BYTES = 256 << 20
"""Pages that wait to be written take slots of the host level."""
_RETRY_SECONDS = 1.0


class DiskPages:
    """At most `max_bytes` of files of pages with `page_bytes` each. Thread-safe."""

    def __init__(self, folder: Path, fingerprint: bytes, page_bytes: int, max_bytes: int) -> None:
        """Open the folder; `fingerprint` has 16 bytes. Raises FailedPrecondition if it cannot be written."""
        self._folder = folder
        self._fingerprint = fingerprint
        self._page_bytes = page_bytes
        self._max_bytes = max_bytes
        self._most_queued = max(1, _QUEUED_BYTES // page_bytes)
        self._queued = 0
        self._guard = threading.Lock()
        self._files: OrderedDict[str, int] = OrderedDict()
        """Name and size, least recently used first."""
        self._opened = self._off = self._closed = self._damage_logged = False
        self._next_try = 0.0
        self.held_bytes = 0
        self._running = FileLock(folder / "lock")
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._open()
        except OSError as error:
            self._running.release()
            raise FailedPrecondition(
                f"parameter kv_disk_path: {str(folder)[:200]!r} cannot be used ({os.strerror(error.errno or 0)}): name a "
                "folder that the server can write to"
            ) from None
        if not self._opened:
            log.warning("Another instance uses %s: KV pages are not kept on disk until it ends.", folder)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="llm kv disk write")
        self._readers = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="llm kv disk read")

    def has(self, page_hash: bytes) -> bool:
        """Return whether there is a file for a page."""
        with self._guard:
            return not self._off and self._name(page_hash) in self._files

    def write(self, page_hash: bytes, data: memoryview, done: Callable[[bool], None]) -> bool:
        """Write a page in a thread, which then calls `done` with whether it is there. False: not now, or not any more."""
        with self._guard:
            if self._off or self._closed or self._queued >= self._most_queued or not self._may_write():
                return False
            self._queued += 1
        self._writer.submit(self._write, page_hash, data, done)
        return True

    def read(self, page_hash: bytes, target: memoryview, done: Callable[[bool], None]) -> None:
        """Read a page in a thread, which then calls `done` with whether all of it was read."""
        self._readers.submit(self._read, page_hash, target, done)

    def close(self) -> None:
        """Finish the reads and the write in progress; drop the writes that wait."""
        with self._guard:
            self._closed = True
        self._readers.shutdown()
        self._writer.shutdown()
        self._running.release()

    def _may_write(self) -> bool:
        """Return whether the folder is open, or its lock should be tried again. With the guard held."""
        if self._opened:
            return True
        now = time.monotonic()
        if now < self._next_try:
            return False
        self._next_try = now + _RETRY_SECONDS
        return True

    def _open(self) -> None:
        """Lock the folder, if it is free, and look what there is. Raises OSError."""
        if not self._running.try_acquire():
            return
        remove_temporary_files(self._folder)
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
        foreign = sum(not name.startswith(self._fingerprint.hex()) for _, name, _ in found)
        if foreign:
            log.info(
                "%d KV pages in %s belong to another model, adapter, page layout or version: they are ignored.",
                foreign,
                self._folder,
            )
        with self._guard:
            self._files = OrderedDict((name, size) for _, name, size in sorted(found))
            self.held_bytes = sum(self._files.values())
            self._opened = True
            self._make_room(0)

    def _make_room(self, size: int) -> None:
        """Remove files until `size` bytes fit. With the guard held."""
        while self._files and self.held_bytes + size > self._max_bytes:
            name, freed = self._files.popitem(last=False)
            self.held_bytes -= freed
            (self._folder / name).unlink(missing_ok=True)

    # In threads

    def _write(self, page_hash: bytes, data: memoryview, done: Callable[[bool], None]) -> None:
        written = False
        try:
            if not self._closed and not self._off:
                written = self._write_file(page_hash, data)
        except OSError as error:
            self._switch_off(error)
        except Exception:
            log.exception("A KV page could not be written to %s.", self._folder)
        finally:
            with self._guard:
                self._queued -= 1
            done(written)

    def _write_file(self, page_hash: bytes, data: memoryview) -> bool:
        if not self._opened:
            self._open()
            if not self._opened:
                return False
        name, size = self._name(page_hash), _HEADER.size + len(data)
        with self._guard:
            if name in self._files:
                return True
            if size > self._max_bytes:
                return False
            self._make_room(size)
        header = _HEADER.pack(_MAGIC, _VERSION, self._fingerprint, page_hash, len(data), zlib.crc32(data))
        # Not durable: after a power failure the checksum finds what is not there.
        write_atomically(self._folder / name, header + data, durable=False)
        with self._guard:
            self._files[name] = size
            self.held_bytes += size
        return True

    def _switch_off(self, error: OSError) -> None:
        """Use the disk no more."""
        with self._guard:
            was_off, self._off = self._off, True
        if not was_off:
            log.error(
                "KV pages can no longer be written to %s (%s): the disk level is off until the model is loaded again.",
                self._folder,
                os.strerror(error.errno or 0),
            )

    def _read(self, page_hash: bytes, target: memoryview, done: Callable[[bool], None]) -> None:
        whole = False
        try:
            whole = self._read_file(page_hash, target)
        except Exception:
            log.exception("A KV page could not be read from %s.", self._folder)
        finally:
            done(whole)

    def _read_file(self, page_hash: bytes, target: memoryview) -> bool:
        name = self._name(page_hash)
        path = self._folder / name
        expected = (_MAGIC, _VERSION, self._fingerprint, page_hash, self._page_bytes)
        header = bytearray(_HEADER.size)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as stream:
                whole = _fill(stream.readinto, memoryview(header)) and _fill(stream.readinto, target)
                whole = whole and not stream.read(1)
                os.utime(stream.fileno())  # the next start knows the order
        except OSError as error:
            self._forget(name, f"cannot be read ({os.strerror(error.errno or 0)})")
            return False
        if not whole or _HEADER.unpack(header) != (*expected, zlib.crc32(target)):
            self._forget(name, "is damaged")
            return False
        with self._guard:
            if name in self._files:
                self._files.move_to_end(name)
        return True

    def _forget(self, name: str, why: str) -> None:
        """Remove a file that is of no use."""
        with self._guard:
            known = self._files.pop(name, None)
            self.held_bytes -= known or 0
            logged, self._damage_logged = self._damage_logged, self._damage_logged or known is not None
        if known is None:
            return  # it was removed to make room
        if not logged:
            log.warning("The KV page %s %s: it is removed, and so are others, without a line for each.", name, why)
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError:
            log.debug("%s cannot be removed.", name, exc_info=True)

    def _name(self, page_hash: bytes) -> str:
        return f"{self._fingerprint.hex()}-{page_hash.hex()}.kv"


def _fill(read_into: Callable[[memoryview], int | None], target: memoryview) -> bool:
    """Read until the target is full; False at the end of the file."""
    while target:
        count = read_into(target)
        if not count:
            return False
        target = target[count:]
    return True
