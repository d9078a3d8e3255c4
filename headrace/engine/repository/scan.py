# SPDX-License-Identifier: Apache-2.0
"""What lies in the folders of one or several repositories: models, versions, and fingerprints that tell of changes.

Called by `control` in a thread, and by `check`. Reads names and `stat` only, never a file's content: a scan of 100
models of one version takes 7 ms, so a poll every 15 s costs 0.05 % of a core. Knows no configuration: which
versions are wanted is for others to say.
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
"""Of one version: enough for a tree of weights, too few for a symlink to `/` to keep a thread busy."""
_SIDE_FOLDERS = ("warmup", "initial_state", "configs")
_CONFIGS = ("config.pbtxt", "config.json", "config.yaml", "config.yml")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Equal as long as nothing was written, replaced or renamed."""

    digest: bytes
    changed: float = field(compare=False, default=0.0)
    """When something in it last changed, by the file system's clock (`ctime`, which copying cannot set back)."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """One model's folder as a scan saw it."""

    name: str
    folder: Path
    versions: Mapping[int, Fingerprint]
    beside: Fingerprint
    """The files beside the version folders: configuration, labels, warm-up data."""
    problem: str = ""
    """Why it cannot be used at all, whatever is in it."""

    @property
    def changed(self) -> float:
        """When anything in it last changed."""
        return max([self.beside.changed, *(print_.changed for print_ in self.versions.values())])


@dataclass(frozen=True, slots=True)
class Stray:
    """Something in a repository that is no model, or in a model that is no version."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one scan found."""

    models: Mapping[str, FoundModel]
    unreadable: tuple[Path, ...] = ()
    """Repositories that could not be read this time: their models are not gone, they are not known."""
    strays: tuple[Stray, ...] = ()


def open_repositories(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    """The folders of the repositories, or what is wrong with the first that cannot be used."""
    folders = []
    for given in paths:
        text = str(given)
        # A Path has folded the two slashes into one.
        if _CLOUD.match(text) or _CLOUD.match(text.replace(":/", "://", 1)):
            raise Unimplemented(
                f"repository {text!a} is not a folder of this machine: `headrace serve` mirrors s3://, gs:// and az:// into "
                "one; for others, sync it to a folder and give that"
            )
        folder = Path(text)
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise InvalidArgument(f"repository {text!a} {what}: give the folder whose sub-folders are the models")
        folders.append(folder)
    return tuple(folders)


def scan(repositories: Sequence[Path]) -> Snapshot:
    """Every model in the repositories. What vanishes meanwhile is not there; it is no error."""
    models: dict[str, FoundModel] = {}
    unreadable: list[Path] = []
    strays: list[Stray] = []
    for repository in repositories:
        try:
            entries = _listed(repository)
        except OSError as error:
            log.warning("cannot read repository %s: %s; its models stay as they are", repository, error.strerror)
            unreadable.append(repository)
            continue
        for entry in entries:
            found = _look(repository, entry, strays)
            if found is not None:
                other = models.get(found.name)
                models[found.name] = found if other is None else _twice(other, found)
    for stray in strays:
        log.debug("ignored %s: %s", stray.path, stray.text)
    return Snapshot(models, tuple(unreadable), tuple(strays))


def scan_model(repositories: Sequence[Path], name: str) -> FoundModel | None:
    """One model of them, as `scan` would find it."""
    found: FoundModel | None = None
    if not is_name(name):
        return None
    for repository in repositories:
        here = _model(name, repository / name, [])
        if here is not None:
            found = here if found is None else _twice(found, here)
    return found


def model_names(repositories: Sequence[Path]) -> list[str]:
    """The names alone, which is quicker: no version is looked into."""
    names: set[str] = set()
    for repository in repositories:
        try:
            entries = _listed(repository)
        except OSError as error:
            log.warning("cannot read repository %s: %s", repository, error.strerror)
            continue
        names.update(entry.name for entry in entries if is_name(entry.name) and _has_model(repository / entry.name))
    return sorted(names)


def _look(repository: Path, entry: os.DirEntry[str], strays: list[Stray]) -> FoundModel | None:
    path = repository / entry.name
    if entry.name.startswith("."):
        log.debug("ignored %s: hidden", path)
        return None
    if not _is_folder(entry):
        strays.append(Stray(path, "a file beside the models is ignored"))
        return None
    if not is_name(entry.name):
        strays.append(Stray(path, "not a model's name: use letters, digits, '_', '.' and '-'; the folder is ignored"))
        return None
    found = _model(entry.name, path, strays)
    if found is None:
        strays.append(Stray(path, "a folder with neither a configuration nor a version is no model; it is ignored"))
    return found


def _model(name: str, folder: Path, strays: list[Stray]) -> FoundModel | None:
    try:
        entries = _listed(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None  # gone between two looks, or no folder at all
    except OSError as error:
        # Not gone, but not known: what serves goes on.
        problem = f"the folder of model '{name}' cannot be read: {error.strerror}; check its permissions"
        return FoundModel(name, folder, {}, Fingerprint(b"unreadable"), problem)
    versions: dict[int, Fingerprint] = {}
    beside = _Digest()
    configured = False
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if not _is_folder(entry):
            configured = configured or entry.name in _CONFIGS
            if not entry.name.upper().startswith(("README", "LICENSE")):
                beside.add(entry, entry.name)
        elif _VERSION.fullmatch(entry.name):
            versions[parse_version(entry.name)] = _fingerprint(folder / entry.name)
        elif entry.name in _SIDE_FOLDERS:
            beside.walk(folder / entry.name, entry.name)
        elif entry.name != "__pycache__":
            strays.append(Stray(folder / entry.name, "not a version: versions are whole numbers such as 1; ignored"))
    if not versions and not configured:
        return None
    return FoundModel(name, folder, dict(sorted(versions.items())), beside.done())


def _has_model(folder: Path) -> bool:
    return any(
        entry.name in _CONFIGS or (_VERSION.fullmatch(entry.name) and _is_folder(entry))
        for entry in _quietly_listed(folder)
    )


def _twice(one: FoundModel, other: FoundModel) -> FoundModel:
    # Which one was meant is not ours to guess, and the order of options must not decide it.
    problem = one.problem or f"model '{one.name}' is in two repositories, {one.folder} and {other.folder}"
    problem = problem.removesuffix("; remove one") + "; remove one"
    both = _Digest()
    both.take(one.beside)
    both.take(other.beside)
    return FoundModel(one.name, one.folder, {}, both.done(), problem)


def _fingerprint(folder: Path) -> Fingerprint:
    digest = _Digest()
    digest.own(folder)
    digest.walk(folder, "")
    return digest.done()


class _Digest:
    """Gathers names, sizes, times and inodes into one fingerprint."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._changed = 0.0
        self._left = _ENTRIES

    def own(self, folder: Path) -> None:
        """The folder itself: it may be a symlink that was pointed elsewhere. Its times say when it last lost a file."""
        try:
            stat = folder.stat()
        except OSError:
            return
        self._hash.update(struct.pack("<qq", stat.st_dev & 0x7FFFFFFFFFFFFFFF, stat.st_ino & 0x7FFFFFFFFFFFFFFF))
        self._changed = max(self._changed, stat.st_ctime)

    def add(self, entry: os.DirEntry[str], relative: str) -> None:
        """One file."""
        try:
            stat = entry.stat()
        except OSError:
            return  # gone, or a symlink to nowhere
        numbers = struct.pack("<qqq", stat.st_size, stat.st_mtime_ns, stat.st_ino & 0x7FFFFFFFFFFFFFFF)
        self._hash.update(relative.encode(errors="surrogateescape") + b"\0" + numbers)
        self._changed = max(self._changed, stat.st_ctime)

    def take(self, other: Fingerprint) -> None:
        """Another fingerprint as a part of this one."""
        self._hash.update(other.digest)
        self._changed = max(self._changed, other.changed)

    def walk(self, folder: Path, relative: str, depth: int = 0) -> None:
        """Everything below a folder, symlinks followed, as far as the bounds go."""
        for entry in _quietly_listed(folder):
            # A model's own interpreter writes __pycache__ while it loads; that is no change of the model.
            if entry.name.startswith(".") or entry.name == "__pycache__":
                continue
            self._left -= 1
            if self._left < 0 or depth >= _DEPTH:
                log.debug("%s is deeper or larger than is watched for changes", folder)
                return
            path = f"{relative}/{entry.name}"
            if _is_folder(entry):
                self._hash.update(path.encode(errors="surrogateescape") + b"/\0")
                self._changed = max(self._changed, _changed(entry))
                self.walk(folder / entry.name, path, depth + 1)
            else:
                self.add(entry, path)

    def done(self) -> Fingerprint:
        """What came together."""
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
