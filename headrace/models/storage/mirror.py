# SPDX-License-Identifier: Apache-2.0
"""Keep a local folder in sync with a prefix of an object store."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from headrace.core import errors
from headrace.core.errors import Cancelled, FailedPrecondition, HeadraceError, Internal, Unavailable
from headrace.core.fault_points import fault_point
from headrace.core.files import FileLock, write_atomically
from headrace.core.telemetry.progress import Progress, silent
from headrace.models.storage.cache import DownloadProgress, allocated_bytes, folder_bytes
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.errors import DataDamaged, NoRoom, no_room, readable_bytes
from headrace.models.storage.locations import ObjectLocation, parse_location
from headrace.models.storage.object_stores import (
    Listing,
    ObjectLimits,
    ObjectSource,
    StoredObject,
    environment_endpoint,
)

log = logging.getLogger("headrace.storage")

_LOCK, _STATE, _INCOMING, _JOURNAL = ".lock", ".mirror.json", ".incoming", ".incoming.parts"
_REMOVED = ".going"
_OWN_NAMES = frozenset({_LOCK, _STATE, _INCOMING, _JOURNAL, _REMOVED})
_VERSION = re.compile(r"[^/]+/[0-9]+")
_LIMITS = ObjectLimits(idle_seconds=30.0, retry_seconds=10.0)


class Mirror:
    """One prefix and its local folder."""

    def __init__(
        self,
        location: ObjectLocation,
        folder: Path,
        credentials: CloudCredentials | None = None,
        limits: ObjectLimits = _LIMITS,
        progress: Progress = silent,
    ) -> None:
        self.location = location
        self.folder = folder
        self._credentials = credentials
        self._limits = limits
        self._progress = progress
        self._stop = threading.Event()
        self._last_warning = ""
        # Created by the first sync, which runs after workers are forked.
        self._source: ObjectSource | None = None

    def start(self) -> None:
        """Sync for the first time. Raises, unless the store is unreachable and an earlier mirror exists."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise FailedPrecondition(
                f"the folder {self.folder} for {self.location} cannot be created: {error.strerror}"
            ) from None
        try:
            self.build()
        except Unavailable as error:
            if not self._read_state():
                raise
            self._warn_once(f"{error.message}; the earlier mirror is served until the store is reachable")

    def refresh(self) -> None:
        """Apply changes. A problem is logged once; the models stay in service."""
        try:
            self.build()
            if self._last_warning:
                log.info("%s is mirrored again", self.location)
            self._last_warning = ""
        except Cancelled:
            pass
        except HeadraceError as error:
            self._warn_once(f"{error.message}; the models stay as they are")
        except OSError as error:
            self._warn_once(f"{self.folder} cannot be written: {error.strerror}; the models stay as they are")

    def stop(self) -> None:
        """Cancel a running sync and prevent others: the server is closing."""
        self._stop.set()

    def build(self) -> None:
        """Sync the folder with the store."""
        with self._locked():
            if self._source is None:
                self._source = ObjectSource(self.location, self._credentials, self._limits)
            source = self._source
            listing = source.read_listing()
            if listing.is_file:
                raise FailedPrecondition(
                    f"{self.location} is one object; a repository is a prefix with models below it"
                )
            folders = {entry.name for entry in listing.objects if _is_empty_version(entry)}
            files = {entry.name: entry for entry in listing.objects if entry.name not in folders}
            files = {name: entry for name, entry in files.items() if name.split("/")[0] not in _OWN_NAMES}
            known = self._read_state()
            changed = [entry for name, entry in files.items() if not self._is_current(entry, known.get(name))]
            if changed:
                self._download(source, changed)
            self._move_into_place(changed, folders)
            fingerprints = {name: _fingerprint(entry) for name, entry in files.items()}
            if fingerprints != known:
                self._write_state(fingerprints)
            self._remove_others(set(files), folders)

    def _is_current(self, entry: StoredObject, fingerprint: object) -> bool:
        """Return whether a local file is the same as in the store."""
        try:
            status = os.lstat(self.folder / entry.name)
        except OSError:
            return False
        return fingerprint == _fingerprint(entry) and status.st_size == entry.size

    def _download(self, source: ObjectSource, changed: list[StoredObject]) -> None:
        incoming, journal = self.folder / _INCOMING, self.folder / _JOURNAL
        listing = Listing(tuple(changed), is_file=False)
        if not journal.exists():
            shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir(exist_ok=True)
        needed = listing.size - folder_bytes(incoming, allocated_bytes)
        if needed > shutil.disk_usage(self.folder).free:
            raise NoRoom(no_room(str(self.location), self.folder, needed))
        log.info("%s: downloading %d files, %s", self.location, len(changed), readable_bytes(listing.size))
        download = DownloadProgress(self._progress, f"download {self.location}", listing.size)
        download.report("running")
        try:
            source.download(listing, incoming, download.add, cancelled=self._stop.is_set, journal=journal)
        except BaseException as error:
            download.report("failed")
            if isinstance(error, DataDamaged | NoRoom):
                shutil.rmtree(incoming, ignore_errors=True)
                journal.unlink(missing_ok=True)
            raise
        download.report("finished")

    def _move_into_place(self, changed: list[StoredObject], folders: set[str]) -> None:
        """Move downloaded files into place: new versions as a whole, configurations last."""
        incoming = self.folder / _INCOMING
        new_versions = {
            version
            for version in {"/".join(entry.name.split("/")[:2]) for entry in changed if entry.name.count("/") > 1}
            if _VERSION.fullmatch(version) and not os.path.lexists(self.folder / version)
        }
        for version in sorted(new_versions):
            self._move(incoming / version, self.folder / version)
        rest = [entry for entry in changed if not any(entry.name.startswith(f"{version}/") for version in new_versions)]
        for entry in sorted(rest, key=lambda entry: (-entry.name.count("/"), entry.name)):
            self._move(incoming / entry.name, self.folder / entry.name)
        for name in sorted(folders):
            path = self.folder / name
            if not path.is_dir():
                path.unlink(missing_ok=True)
                path.mkdir(parents=True, exist_ok=True)
        (self.folder / _JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(incoming, ignore_errors=True)

    def _move(self, source: Path, target: Path) -> None:
        """Move a file or folder; it may replace a folder by a file, or a file by a folder."""
        for parent in target.parents:
            if parent == self.folder:
                break
            if parent.is_file():
                parent.unlink()
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir() and not source.is_dir():
            shutil.rmtree(target)
        fault_point("storage.mirror.move")
        source.rename(target)

    def _remove_others(self, files: set[str], folders: set[str]) -> None:
        """Remove models, versions and files that the store no longer has, and empty folders."""
        current = {"/".join(name.split("/")[:depth]) for name in files | folders for depth in (1, 2)}
        for path in (*self.folder.glob("*/"), *self.folder.glob("*/*/")):
            relative = path.relative_to(self.folder)
            if str(relative) not in current and relative.parts[0] not in _OWN_NAMES and path.exists():
                self._remove_folder(path)
        for parent, _, names in os.walk(self.folder, topdown=False):
            relative = Path(parent).relative_to(self.folder)
            if relative.parts and relative.parts[0] in _OWN_NAMES:
                continue
            for name in names:
                if str(relative / name) not in files and name not in _OWN_NAMES:
                    (self.folder / relative / name).unlink(missing_ok=True)
            if relative.parts and str(relative) not in folders:
                with contextlib.suppress(OSError):  # Not empty.
                    os.rmdir(parent)

    def _remove_folder(self, path: Path) -> None:
        """Remove a folder; rename it first, so that no process sees half a version."""
        removed = self.folder / _REMOVED
        shutil.rmtree(removed, ignore_errors=True)
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    def _read_state(self) -> dict[str, object]:
        try:
            state = json.loads((self.folder / _STATE).read_bytes())
        except (OSError, ValueError):
            return {}
        if (
            not isinstance(state, dict)
            or state.get("place") != str(self.location)
            or not isinstance(state["files"], dict)
        ):
            return {}
        return dict(state["files"])

    def _write_state(self, fingerprints: dict[str, list[object]]) -> None:
        state = json.dumps({"place": str(self.location), "files": fingerprints})
        write_atomically(self.folder / _STATE, state.encode(), mode=None, durable=False)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold a lock against other workers and servers that use the same folder."""
        lock = FileLock(self.folder / _LOCK)
        try:
            while self._stop.is_set() or not lock.try_acquire():
                if self._stop.wait(0.2):
                    raise Cancelled(f"mirroring {self.location} was stopped")
            yield
        finally:
            lock.release()

    def _warn_once(self, text: str) -> None:
        if text != self._last_warning:
            log.warning("repository %s: %s", self.location, text)
        self._last_warning = text


def mirror_folder(base: Path, location: ObjectLocation) -> Path:
    """Return the folder for a location's mirror, below the folder of all mirrors: the same for the same environment."""
    text = f"{location}\n{environment_endpoint(location)}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{location.bucket}-{location.key}").strip(".-")[:80]
    return base / f"{name}-{digest}"


def _is_empty_version(entry: StoredObject) -> bool:
    """Return whether an object marks a version without files: an empty object `model/1/`; obstore drops the slash."""
    return entry.size == 0 and _VERSION.fullmatch(entry.name) is not None


def _fingerprint(entry: StoredObject) -> list[object]:
    return [entry.size, entry.etag or entry.changed]


def mirror_once(location: ObjectLocation, folder: Path) -> None:
    """Sync a folder once in a child process, with the environment's credentials. Raises what `Mirror.start` does."""
    log.info("mirroring %s", location)
    done = subprocess.run(  # noqa: S603 - this interpreter, this module, no shell
        [sys.executable, "-m", __name__, str(location), str(folder)], capture_output=True, text=True, check=False
    )
    for line in done.stderr.splitlines():
        log.info("%s", line)
    try:
        result = json.loads(done.stdout)
        code, message = str(result["code"]), str(result["message"])
    except (ValueError, KeyError, TypeError):
        raise Internal(f"{location} could not be mirrored: the process for it ended with {done.returncode}") from None
    if code:
        raise _error(code, message)


def main(arguments: list[str]) -> int:
    """Run the child process. Errors are written as JSON for the parent; logs go to stderr."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    code = message = ""
    try:
        location = parse_location(arguments[0])
        if not isinstance(location, ObjectLocation):
            raise errors.InvalidArgument(f"{location} is not in an object store")
        Mirror(location, Path(arguments[1])).start()
    except HeadraceError as error:
        code, message = error.code.value, error.message
    print(json.dumps({"code": code, "message": message}))
    return 0


def _error(code: str, message: str) -> HeadraceError:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeadraceError)]
    kind = next((kind for kind in kinds if kind is not HeadraceError and kind.code.value == code), Internal)
    return kind(message)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
