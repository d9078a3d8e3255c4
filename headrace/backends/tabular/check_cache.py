# SPDX-License-Identifier: Apache-2.0
"""A cache of model-file checks, so that an unchanged file is checked once and not at every start of the server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from headrace.backends.model_config import parse_int
from headrace.models.config.types import ModelConfig
from headrace.version import __version__

ENVIRONMENT_VARIABLE = "HEADRACE_CHECKED_FILES"
"""Environment variable; 0 disables the cache for all models of a server."""
MAX_BYTES = 2 << 30
MAX_AGE_SECONDS = 30 * 24 * 3600.0
"""Remove an entry after this time without use."""

_SUFFIX = ".checked"
_NEW = ".new-"
_STALE_SECONDS = 3600.0
_MIN_DISK_BYTES = 4096
_DIGEST_BYTES = 32
_LENGTH = struct.Struct(">Q")
_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

log = logging.getLogger("headrace.backends")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A cache entry."""

    facts: Mapping[str, Any]
    content: memoryview


def default_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the cache folder of this user; None if there is none or the cache is disabled."""
    if environment.get(ENVIRONMENT_VARIABLE, "1").lower() in ("0", "false", "off", "no"):
        return None
    base = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    # expanduser returns a relative path for a user without a home.
    return Path(base, "headrace", "checked") if os.path.isabs(base) else None


class CheckCache:
    """The cache entries of one user."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES, max_age_seconds: float = MAX_AGE_SECONDS) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_age_seconds = max_age_seconds

    def find(self, key: Mapping[str, str]) -> CacheEntry | None:
        """Return the entry for this key, if it is intact."""
        name = _name(key)
        try:
            with self._opened() as folder:
                data = _read(folder, name)
                entry = _decode(data, key)
                if entry is None:
                    log.warning("%s is damaged; the model's file is checked again", self._folder / name)
                    os.unlink(name, dir_fd=folder)
                return entry
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("cannot read the check cache: %s: %s", self._folder, error.strerror)
            return None

    def keep(self, key: Mapping[str, str], facts: Mapping[str, Any], content: bytes | bytearray = b"") -> None:
        """Write an entry; evict others if it needs their space."""
        document = json.dumps({"key": dict(key), "facts": dict(facts)}).encode()
        header = _LENGTH.pack(len(document)) + document
        size = _DIGEST_BYTES + len(header) + len(content)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._opened() as folder:
                if self._evict(folder, size):
                    checksum = hashlib.sha256(header)
                    checksum.update(content)
                    _write(folder, _name(key), checksum.digest() + header, content)
        except OSError as error:
            log.info("cannot write the check cache: %s: %s", self._folder, error.strerror)

    def remove(self, key: Mapping[str, str]) -> None:
        """Remove an entry."""
        with contextlib.suppress(OSError), self._opened() as folder:
            os.unlink(_name(key), dir_fd=folder)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the folder and keep its descriptor, so that no other process can swap it."""
        folder = os.open(self._folder, _READ_ONLY | os.O_DIRECTORY)
        try:
            status = os.fstat(folder)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise PermissionError(
                    0, "other users can enter this folder, or one of them owns it; chmod 700 it, or remove it"
                )
            yield folder
        finally:
            os.close(folder)

    def _evict(self, folder: int, size: int) -> bool:
        """Remove old and surplus entries; return whether an entry of this size may be written."""
        disk = os.statvfs(folder)
        # A cache must not fill the disk, nor hold a single file only.
        if size > self._max_bytes // 2 or 2 * size > disk.f_bavail * disk.f_frsize:
            log.info("check not cached: %s has no room for %d bytes", self._folder, size)
            return False
        now, kept = time.time(), []
        for name, status in _entries(folder):
            unfinished = name.startswith(_NEW)
            if now - status.st_mtime > (_STALE_SECONDS if unfinished else self._max_age_seconds):
                _remove(folder, name)
            elif not unfinished:
                kept.append((status.st_mtime, max(status.st_size, _MIN_DISK_BYTES), name))
        total = sum(entry_bytes for _, entry_bytes, _ in kept) + size
        for _, entry_bytes, name in sorted(kept):
            if total <= self._max_bytes:
                break
            _remove(folder, name)
            total -= entry_bytes
        return True


def _name(key: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest() + _SUFFIX


def _read(folder: int, name: str) -> bytes:
    # O_NONBLOCK: opening a FIFO of this name would block.
    file = os.open(name, _READ_ONLY | os.O_NONBLOCK, dir_fd=folder)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        os.close(file)
        raise PermissionError(0, f"{name} is not a file that only this user can write; remove it")
    with os.fdopen(file, "rb", buffering=0) as opened:
        # The modification time is the time of last use.
        with contextlib.suppress(OSError):
            os.utime(file)
        return opened.readall()


def _decode(data: bytes, key: Mapping[str, str]) -> CacheEntry | None:
    """Decode an entry; None if it is damaged or belongs to another key."""
    view = memoryview(data)
    header_bytes = _DIGEST_BYTES + _LENGTH.size
    if len(data) < header_bytes or hashlib.sha256(view[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
        return None
    (length,) = _LENGTH.unpack_from(data, _DIGEST_BYTES)
    if length > len(data) - header_bytes:
        return None
    try:
        document = json.loads(data[header_bytes : header_bytes + length])
        facts = document["facts"]
        fits = document["key"] == dict(key) and isinstance(facts, dict)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return CacheEntry(facts, view[header_bytes + length :]) if fits else None


def _write(folder: int, name: str, header: bytes, content: bytes | bytearray) -> None:
    new = f"{_NEW}{os.getpid()}-{secrets.token_hex(8)}"
    file = os.open(new, _CREATE_NEW, 0o600, dir_fd=folder)
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(header)
            opened.write(content)
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _remove(folder, new)
        raise


def _entries(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files of this cache and no others."""
    for name in os.listdir(folder):
        if name.endswith(_SUFFIX) or name.startswith(_NEW):
            with contextlib.suppress(OSError):
                yield name, os.stat(name, dir_fd=folder, follow_symlinks=False)


def _remove(folder: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


MIN_FILE_BYTES = 1 << 20
"""Smaller files are not cached."""
SETTLED_SECONDS = 2.0
"""Minimum age of a file whose digest is cached: two changes within one clock tick have the same timestamp."""

_CHUNK_BYTES = 4 << 20

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Format(Generic[Read]):
    """How to check and read the files of one library."""

    name: str
    checks: int
    """The version of the checks; entries of another version are not used."""
    library: str
    """The version of the library that reads the checked data."""
    check: Callable[[bytearray], Read]
    """Check the file. It may keep or change the data, unless it raises one of `errors`."""
    facts: Callable[[Read], tuple[Mapping[str, Any], bytes | bytearray]]
    """Return what to cache: JSON values, and the bytes that the library reads in place of the file, if any."""
    recall: Callable[[bytearray, Mapping[str, Any], memoryview], Read]
    """Return the result of `check` from the same data and the cached facts."""
    errors: tuple[type[Exception], ...]


def read_checked(config: ModelConfig, file: Path, format_: Format[Read]) -> Read:
    """Read and check a file, or use the cached check. Raise one of the format's errors for an invalid file."""
    wanted = parse_int(config.parameters, "checked_file_cache", 1, 1)
    folder = default_folder(os.environ) if wanted else None
    if folder is None or file.stat().st_size < MIN_FILE_BYTES:
        return format_.check(read_file(file, hashed=False)[0])
    entries = CheckCache(folder)
    data, digest = _read_known(file, entries)
    key = _key(format_, digest)
    entry = entries.find(key)
    if entry is not None:
        try:
            return format_.recall(data, entry.facts, entry.content)
        except format_.errors:
            log.warning("model %s: the cached check of %s does not match; checking the file again", config.name, file)
            entries.remove(key)
    read = format_.check(data)
    entries.keep(key, *format_.facts(read))
    return read


def _read_known(file: Path, entries: CheckCache) -> tuple[bytearray, str]:
    """Return the file in writable memory and its digest: the cached digest if the file has not changed since."""
    before = _file_identity(file)
    entry = entries.find(before)
    digest = str(entry.facts.get("digest", "")) if entry is not None else ""
    data, hashed = read_file(file, hashed=not digest)
    now = _file_identity(file)
    if digest:
        return data, digest if now == before else hashlib.sha256(data).hexdigest()
    if now == before and time.time() - max(int(now["changed"]), int(now["written"])) / 1e9 > SETTLED_SECONDS:
        entries.keep(now, {"digest": hashed})
    return data, hashed


def _file_identity(file: Path) -> dict[str, str]:
    status = file.stat()
    return {
        # Machines may share the cache folder.
        "machine": os.uname().nodename,
        "path": str(file.absolute()),
        "device": str(status.st_dev),
        "inode": str(status.st_ino),
        "size": str(status.st_size),
        "written": str(status.st_mtime_ns),
        "changed": str(status.st_ctime_ns),
    }


def read_file(file: Path, *, hashed: bool = True) -> tuple[bytearray, str]:
    """Return the file in writable memory, and its SHA-256 or ""."""
    with file.open("rb", buffering=0) as opened:
        data = bytearray(os.fstat(opened.fileno()).st_size)
        digest = hashlib.sha256() if hashed else None
        filled = 0
        # Hashing and reading take about as long, and both release the interpreter lock.
        with ThreadPoolExecutor(1) as hasher, memoryview(data) as view:
            parts: list[Future[None]] = []
            while filled < len(data) and (count := opened.readinto(view[filled : filled + _CHUNK_BYTES])):
                if digest is not None:
                    parts.append(hasher.submit(digest.update, view[filled : filled + count]))
                filled += count
            for part in parts:
                part.result()
    # A short read means that the file is being written; the checks then reject its truncated end.
    del data[filled:]
    return data, digest.hexdigest() if digest is not None else ""


def _key(format_: Format[Any], digest: str) -> dict[str, str]:
    # Includes Headrace's version, so that each release checks every file once with its own checks.
    return {
        "digest": digest,
        "format": format_.name,
        "checks": str(format_.checks),
        "library": format_.library,
        "headrace": __version__,
    }
