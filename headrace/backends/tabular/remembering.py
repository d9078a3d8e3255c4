# SPDX-License-Identifier: Apache-2.0
"""Reads a model's file, and checks it unless the same bytes were checked before.

Called by `xgboost` and `lightgbm`, each with a `Format` that says how its files are checked and what is to be remembered of
that. The digest of what was read into memory decides, and only that memory, or what was kept for its digest, is used: a
file that changes while it is read, or afterwards, changes nothing. Small files are checked as quickly as they are looked up.

Hashing 100 MB takes a tenth of the time that loading them does. So the digest, too, is remembered for a file that has lain
untouched for a while: by where it is, which inode it is, and the two times that the kernel notes with every change.

    parameters
      checked_file_cache   1, unless told: remember that the file was checked (see `checked_files`); 0 check it at each load
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from headrace.backends.parameters import number_of
from headrace.backends.tabular.checked_files import CheckedFiles, usual_folder
from headrace.models.config.types import ModelConfig
from headrace.version import __version__

LEAST_BYTES = 1 << 20
"""Of a file that is remembered."""
SETTLED_SECONDS = 2.0
"""How long ago a file was changed whose digest is remembered: two changes within one tick of a clock look like one."""

_AT_ONCE = 4 << 20

Read = TypeVar("Read")

log = logging.getLogger("headrace.backends")


@dataclass(frozen=True, slots=True)
class Format(Generic[Read]):
    """How the files of a library are read."""

    name: str
    checks: int
    """The version of the checks: what another one has let through is checked again."""
    library: str
    """The version of the library that will read what was checked."""
    check: Callable[[bytearray], Read]
    """May keep or change the data, but not when it raises one of the errors."""
    facts: Callable[[Read], tuple[Mapping[str, Any], bytes | bytearray]]
    """What is to be remembered: things that JSON has, and what the library reads in place of the file, or nothing."""
    recall: Callable[[bytearray, Mapping[str, Any], memoryview], Read]
    """The same as `check`, from the same data and what was remembered."""
    errors: tuple[type[Exception], ...]


def read_checked(config: ModelConfig, file: Path, format_: Format[Read]) -> Read:
    """Raises one of the format's errors for a file that is none of its."""
    wanted = number_of(config.parameters, "checked_file_cache", 1, 1)
    folder = usual_folder(os.environ) if wanted else None
    if folder is None or file.stat().st_size < LEAST_BYTES:
        return format_.check(read_whole(file, hashed=False)[0])
    entries = CheckedFiles(folder)
    data, digest = _read_known(file, entries)
    key = _key(format_, digest)
    remembered = entries.find(key)
    if remembered is not None:
        try:
            return format_.recall(data, remembered.facts, remembered.content)
        except format_.errors:
            log.warning("model %s: what was remembered of %s does not fit; it is checked again", config.name, file)
            entries.forget(key)
    read = format_.check(data)
    entries.keep(key, *format_.facts(read))
    return read


def _read_known(file: Path, entries: CheckedFiles) -> tuple[bytearray, str]:
    """The file, in memory that may be written to, and its digest: the one it had, if nobody has touched it since."""
    before = _standing(file)
    remembered = entries.find(before)
    digest = str(remembered.facts.get("digest", "")) if remembered is not None else ""
    data, hashed = read_whole(file, hashed=not digest)
    now = _standing(file)
    if digest:
        return data, digest if now == before else hashlib.sha256(data).hexdigest()
    if now == before and time.time() - max(int(now["changed"]), int(now["written"])) / 1e9 > SETTLED_SECONDS:
        entries.keep(now, {"digest": hashed})
    return data, hashed


def _standing(file: Path) -> dict[str, str]:
    found = file.stat()
    return {
        # The folder of the entries may be shared by machines.
        "machine": os.uname().nodename,
        "path": str(file.absolute()),
        "device": str(found.st_dev),
        "inode": str(found.st_ino),
        "size": str(found.st_size),
        "written": str(found.st_mtime_ns),
        "changed": str(found.st_ctime_ns),
    }


def read_whole(file: Path, *, hashed: bool = True) -> tuple[bytearray, str]:
    """The file, in memory that may be written to, and its SHA-256, or ""."""
    with file.open("rb", buffering=0) as opened:
        data = bytearray(os.fstat(opened.fileno()).st_size)
        digest = hashlib.sha256() if hashed else None
        filled = 0
        # Hashing and reading take about as long, and neither holds the interpreter.
        with ThreadPoolExecutor(1) as beside, memoryview(data) as view:
            parts: list[Future[None]] = []
            while filled < len(data) and (count := opened.readinto(view[filled : filled + _AT_ONCE])):
                if digest is not None:
                    parts.append(beside.submit(digest.update, view[filled : filled + count]))
                filled += count
            for part in parts:
                part.result()
    # It is shorter only if somebody is writing it, and is then refused for where it ends.
    del data[filled:]
    return data, digest.hexdigest() if digest is not None else ""


def _key(format_: Format[Any], digest: str) -> dict[str, str]:
    # With Headrace's own version, so that each release looks at every file once with its own checks.
    return {
        "digest": digest,
        "format": format_.name,
        "checks": str(format_.checks),
        "library": format_.library,
        "headrace": __version__,
    }
