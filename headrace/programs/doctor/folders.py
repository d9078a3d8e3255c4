# SPDX-License-Identifier: Apache-2.0
"""Check folders: models can be read, state can be written, and disk space is left."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from headrace.core.files import cache_folder
from headrace.programs.doctor.finding import Finding, ok, problem, size, warning

_MIB = 1024 * 1024
_LOW, _LEAST = 1024 * _MIB, 64 * _MIB
_SHM_LOW = 128 * _MIB
"""Docker's default /dev/shm has 64 MiB."""
_ENTRIES = 5000
"""A repository may have a million files; the first ones suffice."""
_FUTURE_SECONDS = 60.0


def state_folder(environ: Mapping[str, str]) -> Path:
    """Return the folders of services and of the local fleet."""
    state_dir = environ.get("HEADRACE_STATE_DIR", "")
    if state_dir:
        return Path(state_dir).expanduser()
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "headrace"


def check_repository(folder: Path) -> Iterator[Finding]:
    """Check that the repository has models, and that this user can read them."""
    name = "repository"
    quoted = shlex.quote(str(folder))
    if not folder.exists():
        yield problem(name, f"{folder} does not exist", f"mkdir -p {quoted}")
        return
    if not folder.is_dir():
        yield problem(name, f"{folder} is a file; a repository is a folder", f"headrace models init {quoted}")
        return
    if not os.access(folder, os.R_OK | os.X_OK):
        yield problem(name, f"{folder} cannot be read by this user", f"sudo chmod a+rX {quoted}")
        return
    models = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    unreadable = next((path for path in islice(_walk(folder), _ENTRIES) if not _readable(path)), None)
    if unreadable is not None and not unreadable.exists() and unreadable.is_symlink():
        fix = f"ls -l {shlex.quote(str(unreadable))}"
        yield problem(name, f"{unreadable} is a link to {os.readlink(unreadable)}, which does not exist", fix)
    elif unreadable is not None:
        fix = f"sudo chmod -R a+rX {quoted}"
        yield problem(name, f"{unreadable} cannot be read by this user: its model will not load", fix)
    elif not models:
        yield warning(name, f"{folder} has no models", f"headrace models init MODEL.onnx --repository {quoted}")
    else:
        yield ok(name, f"{folder}: {len(models)} model(s), readable", f"headrace models check {quoted}")
    future = next((path for path in islice(_walk(folder), _ENTRIES) if _seconds_ahead(path) > _FUTURE_SECONDS), None)
    if future is not None:
        message = f"{future} was written {_seconds_ahead(future):.0f} s in the future: one of two clocks is wrong"
        yield warning("clock and files", message, "timedatectl status")


def check_writable(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check the folders that are written to."""
    for name, folder in (
        ("cache folder", cache_folder(environ)),
        ("state folder", state_folder(environ)),
        ("temporary folder", Path(tempfile.gettempdir())),
    ):
        yield _writable(name, folder)


def check_disk_space(
    environ: Mapping[str, str],
    repository: Path | None,
    shm: Path = Path("/dev/shm"),  # noqa: S108
) -> Iterator[Finding]:
    """Check free space and inodes, once for each disk."""
    devices: set[int] = set()
    for folder in (repository, cache_folder(environ), state_folder(environ), Path(tempfile.gettempdir())):
        existing = _existing(folder) if folder is not None else None
        if existing is None or existing.stat().st_dev in devices:
            continue
        devices.add(existing.stat().st_dev)
        yield _disk_space(existing)
    if not shm.is_dir():
        yield warning(
            "shared memory",
            f"{shm} does not exist: clients and processes cannot share tensors",
            f"sudo mount -t tmpfs shm {shm}",
        )
        return
    total, _, free = shutil.disk_usage(shm)
    if total >= _SHM_LOW and free >= _SHM_LOW:
        yield ok("shared memory", f"{size(free)} of {size(total)} are free in {shm}")
    else:
        inside = Path("/.dockerenv").exists()
        fix = "docker run --shm-size 1g ..." if inside else f"sudo mount -o remount,size=1G {shm}"
        yield warning(
            "shared memory", f"{size(free)} of {size(total)} are free in {shm}; batches of images need more", fix
        )


def _disk_space(folder: Path) -> Finding:
    disk = os.statvfs(folder)
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    name, message = f"disk of {folder}", f"{size(free)} of {size(total)} are free"
    fix = f"du -xh {shlex.quote(str(folder))} 2>/dev/null | sort -rh | head"
    if disk.f_files and not disk.f_favail:
        return problem(name, f"{message}, but no more files can be created (no free inodes)", "df -i")
    if free < _LEAST:
        return problem(name, f"{message}: nothing can be downloaded, and logs stop", fix)
    return warning(name, f"{message}: too little for most models", fix) if free < _LOW else ok(name, message)


def _writable(name: str, folder: Path) -> Finding:
    existing = _existing(folder)
    if existing != folder:
        is_creatable = os.access(existing, os.W_OK | os.X_OK) and existing.is_dir()
        if is_creatable:
            return ok(name, f"{folder} is created when it is needed")
        fix = f"sudo install -d -o $(id -un) {shlex.quote(str(folder))}"
        return problem(name, f"{folder} cannot be created: {existing} is not writable for this user", fix)
    if not existing.is_dir():
        return problem(name, f"{folder} is a file", f"mv {shlex.quote(str(folder))} {shlex.quote(str(folder))}.old")
    if not os.access(existing, os.W_OK | os.X_OK):
        fix = f"sudo chown -R $(id -un) {shlex.quote(str(folder))}"
        return problem(name, f"{folder} is not writable for this user", fix)
    status = existing.stat()
    if status.st_mode & 0o002 and not status.st_mode & 0o1000:
        return warning(name, f"every user may write to {folder}", f"chmod o-w {shlex.quote(str(folder))}")
    return ok(name, f"{folder} can be written")


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest existing one above it."""
    folder = folder.absolute()
    return next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))


def _walk(folder: Path) -> Iterator[Path]:
    for base, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(base, name)


def _readable(path: Path) -> bool:
    return os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK)


def _seconds_ahead(path: Path) -> float:
    try:
        return path.stat().st_mtime - time.time()
    except OSError:
        return 0.0
