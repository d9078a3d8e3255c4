# SPDX-License-Identifier: Apache-2.0
"""A folder kept like what lies below a prefix of an object store: `Mirror`. A repository of models may be one.

Made by `headrace serve`; `refresh` is called before each look at the folder (`RepositorySettings.refresh`), by every worker.
Only what changed is downloaded, beside the folder; then whole files, and whole versions that are new, are renamed into it.
What is known of the store's state lies in the folder itself, so that a server that starts again downloads nothing twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from headrace.core.errors import Cancelled, FailedPrecondition, HeadraceError, Unavailable
from headrace.core.telemetry.progress import Progress, silent
from headrace.models.storage.cache_room import bytes_below, on_disk
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import ObjectPlace
from headrace.models.storage.object_stores import environment_endpoint
from headrace.models.storage.objects import Listing, ObjectLimits, ObjectSource, StoredObject
from headrace.models.storage.problems import DataDamaged, NoRoom, no_room, readable_bytes
from headrace.models.storage.telling import Told

log = logging.getLogger("headrace.storage")

_LOCK, _STATE, _INCOMING, _JOURNAL = ".lock", ".mirror.json", ".incoming", ".incoming.parts"
_GOING = ".going"
_OURS = frozenset({_LOCK, _STATE, _INCOMING, _JOURNAL, _GOING})
_VERSION = re.compile(r"[^/]+/[0-9]+")
_LIMITS = ObjectLimits(idle_seconds=30.0, retry_seconds=10.0)


class Mirror:
    """One prefix, one folder."""

    def __init__(
        self,
        place: ObjectPlace,
        folder: Path,
        credentials: CloudCredentials | None = None,
        limits: ObjectLimits = _LIMITS,
        progress: Progress = silent,
    ) -> None:
        self.place = place
        self.folder = folder
        self._credentials = credentials
        self._limits = limits
        self._progress = progress
        self._stop = threading.Event()
        self._said = ""
        # Made at the first look, which is after a worker was forked.
        self._source: ObjectSource | None = None

    def start(self) -> None:
        """The first look. Raises what is wrong, unless the store is away and a former mirror can serve meanwhile."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise FailedPrecondition(
                f"the folder {self.folder} for what lies at {self.place} cannot be made: {error.strerror}"
            ) from None
        try:
            self.build()
        except Unavailable as error:
            if not self._state():
                raise
            self._say(f"{error.message}; what was mirrored before is served until it answers")

    def refresh(self) -> None:
        """Take in what has changed. What is wrong is told once in the log; what serves goes on serving."""
        try:
            self.build()
            if self._said:
                log.info("%s is followed again", self.place)
            self._said = ""
        except Cancelled:
            pass
        except HeadraceError as error:
            self._say(f"{error.message}; the models stay as they are")
        except OSError as error:
            self._say(f"{self.folder} cannot be written: {error.strerror}; the models stay as they are")

    def stop(self) -> None:
        """End a refresh that is under way, and let no other begin: the server is closing."""
        self._stop.set()

    def build(self) -> None:
        """Make the folder what it should be; raises what is wrong."""
        with self._alone():
            if self._source is None:
                self._source = ObjectSource(self.place, self._credentials, self._limits)
            source = self._source
            listing = source.look()
            if listing.is_file:
                raise FailedPrecondition(f"{self.place} is one object; a repository is a prefix with models below it")
            folders = {entry.name for entry in listing.objects if _is_empty_version(entry)}
            files = {entry.name: entry for entry in listing.objects if entry.name not in folders}
            files = {name: entry for name, entry in files.items() if name.split("/")[0] not in _OURS}
            known = self._state()
            changed = [entry for name, entry in files.items() if not self._has(entry, known.get(name))]
            if changed:
                self._download(source, changed)
            self._place_all(changed, folders)
            marks = {name: _mark(entry) for name, entry in files.items()}
            if marks != known:
                self._write_state(marks)
            self._remove_others(set(files), folders)

    def _has(self, entry: StoredObject, mark: object) -> bool:
        """Whether the file is there as the store has it."""
        try:
            found = os.lstat(self.folder / entry.name)
        except OSError:
            return False
        return mark == _mark(entry) and found.st_size == entry.size

    def _download(self, source: ObjectSource, changed: list[StoredObject]) -> None:
        incoming, journal = self.folder / _INCOMING, self.folder / _JOURNAL
        listing = Listing(tuple(changed), is_file=False)
        if not journal.exists():
            shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir(exist_ok=True)
        needed = listing.size - bytes_below(incoming, on_disk)
        if needed > shutil.disk_usage(self.folder).free:
            raise NoRoom(no_room(str(self.place), self.folder, needed))
        log.info("%s: downloading %d files, %s", self.place, len(changed), readable_bytes(listing.size))
        told = Told(self._progress, f"download {self.place}", listing.size)
        told.say("running")
        try:
            source.download(listing, incoming, told.heard, cancelled=self._stop.is_set, journal=journal)
        except BaseException as error:
            told.say("failed")
            if isinstance(error, DataDamaged | NoRoom):
                shutil.rmtree(incoming, ignore_errors=True)
                journal.unlink(missing_ok=True)
            raise
        told.say("finished")

    def _place_all(self, changed: list[StoredObject], folders: set[str]) -> None:
        """Rename what has come into its place: versions that are new as a whole, configurations last."""
        incoming = self.folder / _INCOMING
        whole = {
            version
            for version in {"/".join(entry.name.split("/")[:2]) for entry in changed if entry.name.count("/") > 1}
            if _VERSION.fullmatch(version) and not os.path.lexists(self.folder / version)
        }
        for version in sorted(whole):
            self._move(incoming / version, self.folder / version)
        rest = [entry for entry in changed if not any(entry.name.startswith(f"{version}/") for version in whole)]
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
        """Also where a file is now a folder, or a folder a file."""
        for above in target.parents:
            if above == self.folder:
                break
            if above.is_file():
                above.unlink()
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir() and not source.is_dir():
            shutil.rmtree(target)
        source.rename(target)

    def _remove_others(self, files: set[str], folders: set[str]) -> None:
        """Models, versions and files that the store has no more, and folders that nothing is in."""
        wanted = {"/".join(name.split("/")[:depth]) for name in files | folders for depth in (1, 2)}
        for path in (*self.folder.glob("*/"), *self.folder.glob("*/*/")):
            inside = path.relative_to(self.folder)
            if str(inside) not in wanted and inside.parts[0] not in _OURS and path.exists():
                self._remove_whole(path)
        for above, _, names in os.walk(self.folder, topdown=False):
            inside = Path(above).relative_to(self.folder)
            if inside.parts and inside.parts[0] in _OURS:
                continue
            for name in names:
                if str(inside / name) not in files and name not in _OURS:
                    (self.folder / inside / name).unlink(missing_ok=True)
            if inside.parts and str(inside) not in folders:
                with contextlib.suppress(OSError):  # something is in it
                    os.rmdir(above)

    def _remove_whole(self, path: Path) -> None:
        """By a rename first: nobody should find half a version."""
        going = self.folder / _GOING
        shutil.rmtree(going, ignore_errors=True)
        path.rename(going)
        shutil.rmtree(going, ignore_errors=True)

    def _state(self) -> dict[str, object]:
        try:
            said = json.loads((self.folder / _STATE).read_bytes())
        except (OSError, ValueError):
            return {}
        if not isinstance(said, dict) or said.get("place") != str(self.place) or not isinstance(said["files"], dict):
            return {}
        return dict(said["files"])

    def _write_state(self, marks: dict[str, list[object]]) -> None:
        fresh = self.folder / f"{_STATE}.new"
        fresh.write_text(json.dumps({"place": str(self.place), "files": marks}))
        fresh.replace(self.folder / _STATE)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other worker or server is at the same folder."""
        descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                if self._stop.is_set():
                    raise Cancelled(f"following {self.place} was stopped")
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._stop.wait(0.2)
            yield
        finally:
            os.close(descriptor)

    def _say(self, text: str) -> None:
        if text != self._said:
            log.warning("repository %s: %s", self.place, text)
        self._said = text


def mirror_folder(base: Path, place: ObjectPlace) -> Path:
    """Where the mirror of a place lies below a folder for all mirrors: always the same, while the environment is."""
    text = f"{place}\n{environment_endpoint(place)}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{place.bucket}-{place.key}").strip(".-")[:80]
    return base / f"{name}-{digest}"


def _is_empty_version(entry: StoredObject) -> bool:
    """A version that needs no files is, in a bucket, an object `model/1/` of no bytes; obstore shows no slash."""
    return entry.size == 0 and _VERSION.fullmatch(entry.name) is not None


def _mark(entry: StoredObject) -> list[object]:
    return [entry.size, entry.etag or entry.changed]
