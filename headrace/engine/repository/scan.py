# SPDX-License-Identifier: Apache-2.0
"""Scan the folders of model repositories: models, versions, and fingerprints that detect changes.

`control` calls it in a thread, and `check` too. A scan reads names and `stat`, never file contents: 100 models with one
version take 7 ms, so a poll every 15 s costs 0.05 % of a core. A scan does not read configurations, so it does not know
which versions are wanted. `ChangeDetector` compares scans and ignores a folder that is still being copied.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.errors import InvalidArgument, Unimplemented
from headrace.core.names import is_name, parse_version

log = logging.getLogger("headrace.engine.repository")

_VERSION = re.compile(r"0|[1-9][0-9]{0,17}")
_CLOUD = re.compile(r"(gs|s3|aws|az|as|azure|abfss?|seaweedfs|https?|hf(_model)?)://", re.IGNORECASE)
_DEPTH = 12
_ENTRIES = 20_000
"""Maximum files of one version: enough for any model, and a symlink to `/` does not keep the thread busy."""
_SIDE_FOLDERS = ("warmup", "initial_state", "configs")
_CONFIGS = ("config.pbtxt", "config.json", "config.yaml", "config.yml")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A digest that stays equal until a file is written, replaced or renamed."""

    digest: bytes
    changed: float = field(compare=False, default=0.0)
    """Time of the last change by the file system's clock (`ctime`, which a copy cannot set back)."""


@dataclass(frozen=True, slots=True)
class ScannedModel:
    """A model's folder at the time of a scan."""

    name: str
    folder: Path
    versions: Mapping[int, Fingerprint]
    shared: Fingerprint
    """Files outside the version folders: configuration, labels, warm-up data."""
    problem: str = ""
    """Why the folder cannot be used, whatever is in it."""

    @property
    def changed(self) -> float:
        """Time of the last change of any file."""
        return max([self.shared.changed, *(version.changed for version in self.versions.values())])

    def fingerprints(self, version: int) -> tuple[Fingerprint | None, Fingerprint]:
        """Return the fingerprint of a version's files (None without a folder), and that of the shared files."""
        return self.versions.get(version), self.shared


@dataclass(frozen=True, slots=True)
class IgnoredPath:
    """A path in a repository that is not a model, or in a model that is not a version."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The result of one scan."""

    models: Mapping[str, ScannedModel]
    unreadable: tuple[Path, ...] = ()
    """Repositories that could not be read in this scan: their models are unknown, not removed."""
    ignored: tuple[IgnoredPath, ...] = ()


def open_repositories(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    """Return the folders of the repositories; raise for the first one that cannot be used."""
    folders = []
    for path in paths:
        text = str(path)
        # `Path` collapses the two slashes into one.
        if _CLOUD.match(text) or _CLOUD.match(text.replace(":/", "://", 1)):
            raise Unimplemented(
                f"repository {text!a} is not a folder of this machine: `headrace serve` mirrors s3://, gs:// and az:// into "
                "one; for others, sync it to a folder and give that"
            )
        folder = Path(text)
        if not folder.is_dir():
            problem = "is not a folder" if folder.exists() else "does not exist"
            raise InvalidArgument(
                f"repository {text!a} {problem}: give a folder of models, or the file or folder of one model"
            )
        folders.append(folder)
    return tuple(folders)


def scan(repositories: Sequence[Path]) -> Snapshot:
    """Return every model in the repositories. Files that disappear during the scan are not an error."""
    models: dict[str, ScannedModel] = {}
    unreadable: list[Path] = []
    ignored: list[IgnoredPath] = []
    for repository in repositories:
        try:
            entries = _listed(repository)
        except OSError as error:
            log.warning("Could not read repository %s: %s; its models stay as they are", repository, error.strerror)
            unreadable.append(repository)
            continue
        for entry in entries:
            model = _scan_entry(repository, entry, ignored)
            if model is not None:
                other = models.get(model.name)
                models[model.name] = model if other is None else _duplicate(other, model)
    for path in ignored:
        log.debug("ignored %s: %s", path.path, path.text)
    return Snapshot(models, tuple(unreadable), tuple(ignored))


def scan_model(repositories: Sequence[Path], name: str) -> ScannedModel | None:
    """Return one model of the repositories, as `scan` would; None if there is none."""
    model: ScannedModel | None = None
    if not is_name(name):
        return None
    for repository in repositories:
        other = _scan_folder(name, repository / name, [])
        if other is not None:
            model = other if model is None else _duplicate(model, other)
    return model


def model_names(repositories: Sequence[Path]) -> list[str]:
    """Return the names of all models, without scanning their versions."""
    names: set[str] = set()
    for repository in repositories:
        try:
            entries = _listed(repository)
        except OSError as error:
            log.warning("Could not read repository %s: %s", repository, error.strerror)
            continue
        names.update(entry.name for entry in entries if is_name(entry.name) and _has_model(repository / entry.name))
    return sorted(names)


def _scan_entry(repository: Path, entry: os.DirEntry[str], ignored: list[IgnoredPath]) -> ScannedModel | None:
    path = repository / entry.name
    if entry.name.startswith("."):
        log.debug("ignored %s: hidden", path)
        return None
    if not _is_folder(entry):
        ignored.append(IgnoredPath(path, "a file beside the models is ignored"))
        return None
    if not is_name(entry.name):
        ignored.append(
            IgnoredPath(path, "not a model's name: use letters, digits, '_', '.' and '-'; the folder is ignored")
        )
        return None
    model = _scan_folder(entry.name, path, ignored)
    if model is None:
        ignored.append(
            IgnoredPath(path, "a folder with neither a configuration nor a version is no model; it is ignored")
        )
    return model


def _scan_folder(name: str, folder: Path, ignored: list[IgnoredPath]) -> ScannedModel | None:
    try:
        entries = _listed(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None  # removed during the scan, or not a folder
    except OSError as error:
        # Unknown, not removed: loaded versions keep serving.
        problem = f"the folder of model '{name}' cannot be read: {error.strerror}; check its permissions"
        return ScannedModel(name, folder, {}, Fingerprint(b"unreadable"), problem)
    versions: dict[int, Fingerprint] = {}
    shared = _Digest()
    configured = False
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if not _is_folder(entry):
            configured = configured or entry.name in _CONFIGS
            if not entry.name.upper().startswith(("README", "LICENSE")):
                shared.add(entry, entry.name)
        elif _VERSION.fullmatch(entry.name):
            versions[parse_version(entry.name)] = _fingerprint(folder / entry.name)
        elif entry.name in _SIDE_FOLDERS:
            shared.walk(folder / entry.name, entry.name)
        elif entry.name != "__pycache__":
            ignored.append(
                IgnoredPath(folder / entry.name, "not a version: versions are whole numbers such as 1; ignored")
            )
    if not versions and not configured:
        return None
    return ScannedModel(name, folder, dict(sorted(versions.items())), shared.done())


def _has_model(folder: Path) -> bool:
    return any(
        entry.name in _CONFIGS or (_VERSION.fullmatch(entry.name) and _is_folder(entry))
        for entry in _quietly_listed(folder)
    )


def _duplicate(first: ScannedModel, second: ScannedModel) -> ScannedModel:
    # Do not guess which one is meant, and do not let the order of options decide.
    problem = first.problem or f"model '{first.name}' is in two repositories, {first.folder} and {second.folder}"
    problem = problem.removesuffix("; remove one") + "; remove one"
    both = _Digest()
    both.add_fingerprint(first.shared)
    both.add_fingerprint(second.shared)
    return ScannedModel(first.name, first.folder, {}, both.done(), problem)


def _fingerprint(folder: Path) -> Fingerprint:
    digest = _Digest()
    digest.add_folder(folder)
    digest.walk(folder, "")
    return digest.done()


class _Digest:
    """Combines names, sizes, times and inodes into one fingerprint."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._changed = 0.0
        self._left = _ENTRIES

    def add_folder(self, folder: Path) -> None:
        """Add the folder itself: it may be a symlink with a new target, and its `ctime` shows when a file was removed."""
        try:
            stat = folder.stat()
        except OSError:
            return
        self._hash.update(struct.pack("<qq", stat.st_dev & 0x7FFFFFFFFFFFFFFF, stat.st_ino & 0x7FFFFFFFFFFFFFFF))
        self._changed = max(self._changed, stat.st_ctime)

    def add(self, entry: os.DirEntry[str], relative: str) -> None:
        """Add one file."""
        try:
            stat = entry.stat()
        except OSError:
            return  # removed, or a dangling symlink
        numbers = struct.pack("<qqq", stat.st_size, stat.st_mtime_ns, stat.st_ino & 0x7FFFFFFFFFFFFFFF)
        self._hash.update(relative.encode(errors="surrogateescape") + b"\0" + numbers)
        self._changed = max(self._changed, stat.st_ctime)

    def add_fingerprint(self, other: Fingerprint) -> None:
        """Add another fingerprint."""
        self._hash.update(other.digest)
        self._changed = max(self._changed, other.changed)

    def walk(self, folder: Path, relative: str, depth: int = 0) -> None:
        """Add everything below a folder, up to the limits; follow symlinks."""
        for entry in _quietly_listed(folder):
            # Loading a Python model writes __pycache__, which is not a change of the model.
            if entry.name.startswith(".") or entry.name == "__pycache__":
                continue
            self._left -= 1
            if self._left < 0 or depth >= _DEPTH:
                log.debug("%s is too deep or too large; changes below it are not detected", folder)
                return
            path = f"{relative}/{entry.name}"
            if _is_folder(entry):
                self._hash.update(path.encode(errors="surrogateescape") + b"/\0")
                self._changed = max(self._changed, _changed(entry))
                self.walk(folder / entry.name, path, depth + 1)
            else:
                self.add(entry, path)

    def done(self) -> Fingerprint:
        """Return the fingerprint."""
        return Fingerprint(self._hash.digest(), self._changed)


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _quietly_listed(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        yield from _listed(folder)
    except OSError:
        return


def _changed(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat().st_ctime
    except OSError:
        return 0.0


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes between two scans."""

    to_load: tuple[ScannedModel, ...]
    """New and changed models."""
    removed: tuple[str, ...]
    unsettled: bool
    """Whether there are changes that have not settled: scan again soon."""


class ChangeDetector:
    """Compares scans; remembers accepted models and changes that have not settled."""

    def __init__(self, settle_seconds: float) -> None:
        self._settle_seconds = settle_seconds
        self._accepted: dict[str, ScannedModel] = {}
        self._unsettled: dict[str, ScannedModel | None] = {}
        """Changed models as of the last scan; None for a missing one."""

    def accept_all(self, models: Mapping[str, ScannedModel]) -> None:
        """Accept the models of the first scan."""
        self._accepted = dict(models)

    def accept(self, model: ScannedModel) -> None:
        """Accept one model that was scanned by itself."""
        self._accepted[model.name] = model
        self._unsettled.pop(model.name, None)

    def diff(self, snapshot: Snapshot, now: float) -> Changes:
        """Return the changes in a scan made at the Unix time `now`.

        New and changed models are accepted if nothing was written for `settle_seconds`; by `ctime`, which a copy cannot set
        back. Since the file system's clock may be that of another machine, they are also accepted if they are the same as
        in the last scan. A model is removed if it is missing in two scans: a folder that is replaced is missing briefly.
        """
        to_load, removed = [], []
        unsettled: dict[str, ScannedModel | None] = {}
        for name, model in snapshot.models.items():
            if self._accepted.get(name) == model:
                continue
            settled = now - model.changed >= self._settle_seconds
            if settled or self._unsettled.get(name) == model:
                self._accepted[name] = model
                to_load.append(model)
            else:
                unsettled[name] = model
        unreadable = set(snapshot.unreadable)
        for name, accepted in list(self._accepted.items()):
            if name in snapshot.models or accepted.folder.parent in unreadable:
                continue
            if name in self._unsettled and self._unsettled[name] is None:
                del self._accepted[name]
                removed.append(name)
            else:
                unsettled[name] = None
        self._unsettled = unsettled
        return Changes(tuple(to_load), tuple(removed), bool(unsettled))
