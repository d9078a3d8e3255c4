# SPDX-License-Identifier: Apache-2.0
"""Tiny models that are made once per machine: `made_once` runs a maker and keeps the folder that it filled.

def write_savedmodel(folder: Path, rows: int) -> None: ...

folder = made_once(write_savedmodel, 8)                    # to read only
folder = copy_of(tmp_path / "1", write_savedmodel, 8)      # to change

The key of a folder is a hash of the maker's source file, the maker's arguments and the versions of all installed packages: a
change of any of them makes it anew. It gets its name when it is complete. If several processes want the same one, the first
makes it while the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace-tests"
_UNUSED_DAYS = 14
"""Folders that no test has used for so long are removed."""


def made_once(make: Callable[..., Any], *arguments: Any, sources: tuple[Path, ...] = ()) -> Path:
    """Return the folder that `make(folder, *arguments)` fills. `sources`: more files that decide what it writes."""
    name = f"{make.__name__}-{_key(make, arguments, sources)}"
    folder = CACHE / name
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with _locked(CACHE / f"{name}.lock"):
            if not folder.exists():
                _make(folder, make, arguments)
    os.utime(folder)
    return folder


def copy_of(target: Path, make: Callable[..., Any], *arguments: Any, sources: tuple[Path, ...] = ()) -> Path:
    """As `made_once`, copied into `target`, where a test may change it."""
    shutil.copytree(made_once(make, *arguments, sources=sources), target, dirs_exist_ok=True)
    return target


def _make(folder: Path, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    _remove_unused()
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir()
    make(unfinished, *arguments)
    unfinished.rename(folder)


def _remove_unused() -> None:
    before = time.time() - _UNUSED_DAYS * 86_400
    for path in CACHE.iterdir():
        with suppress(FileNotFoundError):  # another process does the same
            if path.stat().st_mtime >= before:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _key(make: Callable[..., Any], arguments: tuple[Any, ...], sources: tuple[Path, ...]) -> str:
    digest = hashlib.sha256(f"{make.__qualname__} {arguments!r} {sys.version} {_installed()}".encode())
    for source in (Path(inspect.getfile(make)), *sources):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


@cache
def _installed() -> str:
    """The names and versions of all installed packages."""
    return " ".join(sorted(path.name for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info")))


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
