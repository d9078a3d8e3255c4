# SPDX-License-Identifier: Apache-2.0
"""Folders of hard links: how files of the cache get into a model's folder. Used by `shelf`."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOTSUP}


def files_of(brought: Path) -> Iterator[tuple[str, Path]]:
    """Names and paths of all plain files; links lead who knows where, so they stay behind."""
    if brought.is_file():
        yield brought.name, brought
        return
    for above, folders, names in os.walk(brought):
        folders.sort()
        for name in sorted(names):
            path = Path(above, name)
            if path.is_file() and not path.is_symlink():
                yield str(path.relative_to(brought)), path


def replace_files(path: Path, files: dict[str, Path]) -> None:
    """Make a folder hold these files and no others, each replaced at once."""
    for name, file in files.items():
        to = path / name
        if to.exists() and not to.is_symlink() and to.samefile(file):
            continue
        if to.is_dir() and not to.is_symlink():
            shutil.rmtree(to)
        new = made(path, name).with_name(f".{to.name}.headrace-new")
        new.unlink(missing_ok=True)
        link(file, new)
        new.replace(to)
    for above, _, names in os.walk(path, topdown=False):
        for name in names:
            left = Path(above, name)
            if str(left.relative_to(path)) not in files:
                left.unlink()
        if above != str(path) and not any(Path(above).iterdir()):
            Path(above).rmdir()
    let_others_read(path)


def made(folder: Path, name: str) -> Path:
    """A path in a folder, with the folders above it. What is in their way, and is none, goes."""
    path = folder / name
    for above in reversed(path.relative_to(folder).parents):
        part = folder / above
        if part.is_symlink() or (part.exists() and not part.is_dir()):
            part.unlink()
        part.mkdir(parents=True, exist_ok=True)
    return path


def link(file: Path, to: Path) -> None:
    """A second name of a file; a copy where the file system has none."""
    try:
        os.link(file, to)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(file, to)


def let_others_read(path: Path) -> None:
    """Pods are other users than we are."""
    for above, _, names in os.walk(path):
        allow(Path(above), 0o055)
        for name in names:
            allow(Path(above, name), 0o044)


def allow(path: Path, more: int) -> None:
    """Add rights, if they are not there."""
    mode = path.stat().st_mode
    if mode & more != more:
        path.chmod(mode | more)


def has_files(path: Path) -> bool:
    """Whether something that exists is more than empty folders."""
    return path.is_symlink() or not path.is_dir() or any(names for _, _, names in os.walk(path))


def remove_empty(path: Path) -> None:
    """Remove folders that have no files."""
    for above, _, _ in os.walk(path, topdown=False):
        Path(above).rmdir()
