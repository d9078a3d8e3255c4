# SPDX-License-Identifier: Apache-2.0
"""The node's model store: which folder belongs to which model, whether a download is complete, and how folders are filled.

Used in threads, by one thread per model at a time. Next to the folders of the models, `.headrace` has one cache folder per
source (a cache of `headrace.models.storage`), the records, and temporary folders. A model's folder holds hard links to the
files of the cache: models of one source share its disk space, and each can be deleted on its own. An update replaces the
files one by one in the existing folder, because running pods have that folder mounted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.fault_points import fault_point
from headrace.core.files import FileLock, remove_temporary_files, write_atomically
from headrace.fleet.agent.model_keys import ModelKey, display_name
from headrace.fleet.agent.model_sources import ModelSource
from headrace.models.storage.cache import INCOMPLETE, allocated_bytes, folder_bytes
from headrace.models.storage.errors import NoRoom, readable_bytes
from headrace.models.storage.locations import HubLocation, public_text

STORE_FOLDER = ".headrace"


class ModelStore:
    """The folder of all models of a node. Only one agent uses it at a time."""

    def __init__(self, root: Path, keep_free_bytes: int = 0) -> None:
        self.root = root
        self.records = RecordStore(root / STORE_FOLDER / "models")
        self._keep_free = keep_free_bytes
        self._reserved_bytes: dict[ModelKey, int] = {}
        self._lock = threading.RLock()
        self._only_agent = FileLock(root / STORE_FOLDER / "agent.lock")

    def open(self) -> None:
        """Lock the store, create its folders and read the records. Raises FailedPrecondition."""
        try:
            for name in ("cache", "new"):
                (self.root / STORE_FOLDER / name).mkdir(parents=True, exist_ok=True)
            if not self._only_agent.try_acquire():
                self.close()
                raise FailedPrecondition(f"another agent uses {self.root}; stop it, or name another folder")
            for leftover in (self.root / STORE_FOLDER / "new").iterdir():
                shutil.rmtree(leftover, ignore_errors=True)
            self.records.load()
            cache_names = {record.cache_name for record in self.records.all()}
            for leftover in (self.root / STORE_FOLDER / "cache").iterdir():
                if leftover.name not in cache_names:
                    shutil.rmtree(leftover, ignore_errors=True)
        except OSError as error:
            raise FailedPrecondition(
                f"{self.root} cannot be written to ({os.strerror(error.errno or 0)}); mount the node's folder for models "
                "there, or name another one by --models-root"
            ) from None

    def close(self) -> None:
        """Release the lock."""
        self._only_agent.release()

    # Which folder belongs to which model

    def claim(self, key: ModelKey, source: ModelSource, *, reserved: bool) -> Record:
        """Reserve a path for a model. Raises InvalidArgument, FailedPrecondition."""
        path = self._checked_path(source.path)
        with self._lock:
            before = self.records.get(key)
            for other in self.records.all():
                if other.key != key:
                    self._check_conflict(other, path, source.uri)
            if before is not None and before.path != str(path):
                if not before.gone:
                    self._delete_folder(before)
                before = replace(before, path="", files={})
            if self.has_foreign_files(source.path):
                raise FailedPrecondition(
                    f"{path} has files that this agent did not download; move them away, or serve them as they are with "
                    f"storageUri local://{path}"
                )
            record = Record(*key, source.uri, str(path), cache_name(source), reserved=reserved)
            if before is not None and (before.uri, before.path) == (source.uri, str(path)):
                record = replace(before, reserved=reserved, gone=False)
            elif before is not None:
                record = replace(record, files=before.files)  # whatever their source, the agent downloaded them
            self.records.put(record)
            if before is not None and before.cache_name != record.cache_name:
                self._drop_cache(before)
            return record

    def has_foreign_files(self, value: str) -> bool:
        """Whether a path has files that the agent did not download. Raises InvalidArgument."""
        path = self._checked_path(value)
        with self._lock:
            return not self._is_ours(path) and path.exists() and has_files(path)

    def adopt(
        self,
        key: ModelKey,
        source: ModelSource,
        files: dict[str, int],
        revision: str,
        config: dict[str, Any],
        *,
        reserved: bool,
    ) -> Record:
        """Record the files at a path as those of a model."""
        path = self._checked_path(source.path)
        with self._lock:
            for other in self.records.all():
                if other.key != key:
                    self._check_conflict(other, path, source.uri)
            where = (source.uri, str(path), cache_name(source))
            record = Record(*key, *where, ModelState.READY, revision, "", files, config, reserved)
            self.records.put(record)
            return record

    def is_complete(self, record: Record) -> bool:
        """Whether all files of a model exist with their recorded sizes."""
        if record.state is not ModelState.READY:
            return False
        folder = Path(record.path)
        try:
            return all((folder / name).stat().st_size == size for name, size in record.files.items())
        except OSError:
            return False

    def cache_folder(self, record: Record) -> Path:
        """Return the folder that a source is downloaded to."""
        return self.root / STORE_FOLDER / "cache" / record.cache_name

    # Disk space

    def reserve(self, record: Record, size: int | None) -> None:
        """Reserve disk space for a download, part of which may exist. Raises NoRoom."""
        if size is None:
            return
        with self._lock:
            missing_bytes = self._left(record, size)
            reserved = sum(bytes_ for key, bytes_ in self._reserved_bytes.items() if key != record.key)
            free = shutil.disk_usage(self.root).free
            if missing_bytes and missing_bytes + reserved + self._keep_free > free:
                reservations = f", {readable_bytes(reserved)} of it reserved for other downloads" if reserved else ""
                raise NoRoom(
                    f"there is no room for {public_text(record.uri)}: it needs {readable_bytes(missing_bytes)}, "
                    f"{self.root} has {readable_bytes(free)} free{reservations}, and {readable_bytes(self._keep_free)} must "
                    "stay free; delete models, choose other nodes by spec.storage.nodeSelector, or give the node a larger "
                    "disk"
                )
            self._reserved_bytes[record.key] = missing_bytes

    def update_reservation(self, key: ModelKey, missing_bytes: int) -> None:
        """Set the bytes of a reservation that are still missing; 0 ends it."""
        with self._lock:
            if missing_bytes > 0 and key in self._reserved_bytes:
                self._reserved_bytes[key] = missing_bytes
            else:
                self._reserved_bytes.pop(key, None)

    def _left(self, record: Record, size: int) -> int:
        folder = self.cache_folder(record)
        if any(
            other.cache_name == record.cache_name and other.entry and other.revision == record.revision != ""
            for other in self._installed()
        ):
            return 0
        partial = sum(folder_bytes(path, allocated_bytes) for path in folder.glob(f"{INCOMPLETE}*") if path.is_dir())
        return max(0, size - partial)

    # Adding and removing files

    def install(self, record: Record, downloaded: Path) -> Record:
        """Link the downloaded files into the model's folder, in place of its old ones."""
        path = Path(record.path)
        files = dict(files_of(downloaded))
        if not files:
            raise FailedPrecondition(f"there are no files at {public_text(record.uri)}")
        entry = downloaded.relative_to(self.cache_folder(record)).parts[0]
        sizes = {name: file.stat().st_size for name, file in files.items()}
        # Written before the first file: if the agent is killed from here on, the folder is known to be its own.
        self.records.put(replace(record, state=ModelState.INSTALLING, entry=entry))
        fault_point("agent.model.place")
        if path.exists() and has_files(path):
            replace_files(path, files)
        else:
            self._create_folder(path, record.key, files)
        fault_point("agent.model.placed")
        placed = replace(record, state=ModelState.READY, entry=entry, files=sizes)
        self.records.put(placed)
        with self._lock:
            self._drop_entries(placed)
        return placed

    def remove(self, key: ModelKey, *, keep: bool = False) -> None:
        """Delete a model's files, unless they are reserved or shared with another model, and its cache.

        `keep`: leave the files, and only forget the model.
        """
        with self._lock:
            record = self.records.get(key)
            self._reserved_bytes.pop(key, None)
            if record is None or record.gone:
                return
            if record.reserved and not keep:
                self.records.put(replace(record, gone=True))
                return
            if not keep:
                self._delete_folder(record)
            self.records.drop(key)
            self._drop_cache(record)

    def _checked_path(self, value: str) -> Path:
        path = Path(os.path.normpath(value))
        inside = path.is_relative_to(self.root) and path != self.root
        if not inside or ".." in Path(value).parts or path.is_relative_to(self.root / STORE_FOLDER):
            raise InvalidArgument(
                f"spec.storage.path {value} is not below {self.root}, where this node has its models: write "
                f"{self.root}/NAME, or run the agent with another --models-root"
            )
        try:
            if not path.parent.resolve().is_relative_to(self.root.resolve()):
                raise InvalidArgument(f"spec.storage.path {value} leaves {self.root} through a symbolic link")
        except (OSError, RuntimeError):
            raise InvalidArgument(f"spec.storage.path {value} cannot be resolved") from None
        return path

    def _check_conflict(self, other: Record, path: Path, uri: str) -> None:
        other_path = Path(other.path)
        if other_path == path and other.uri != uri:
            owner = "files of the deleted model" if other.gone else "model"
            raise InvalidArgument(
                f"spec.storage.path {path} has the {owner} {display_name(other.key)}, which has another source; choose "
                "another path"
            )
        if other_path != path and (other_path.is_relative_to(path) or path.is_relative_to(other_path)):
            raise InvalidArgument(
                f"spec.storage.path {path} and {other_path} of {display_name(other.key)} are nested; choose another path"
            )

    def _is_ours(self, path: Path) -> bool:
        return any(record.path == str(path) for record in self.records.all())

    def _installed(self) -> list[Record]:
        return [record for record in self.records.all() if record.state is not ModelState.DOWNLOADING]

    def _create_folder(self, path: Path, key: ModelKey, files: dict[str, Path]) -> None:
        new = self.root / STORE_FOLDER / "new" / hashlib.sha256("/".join(key).encode()).hexdigest()[:32]
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        for name, file in files.items():
            link_or_copy(file, make_parents(new, name))
        make_readable(new)
        path.parent.mkdir(parents=True, exist_ok=True)
        for above in path.parents:
            if above != self.root and above.is_relative_to(self.root):
                add_mode(above, 0o055)
        if path.is_dir() and not path.is_symlink():
            remove_empty(path)
        new.rename(path)

    def _delete_folder(self, record: Record) -> None:
        """Delete the model's folder, unless another record has the same path."""
        path = Path(record.path)
        if any(other.key != record.key and other.path == record.path for other in self.records.all()):
            return
        if record.state is ModelState.DOWNLOADING and not record.files:
            return  # nothing was installed yet
        going = self.root / STORE_FOLDER / "new" / f"going-{hashlib.sha256(record.path.encode()).hexdigest()[:32]}"
        shutil.rmtree(going, ignore_errors=True)
        try:
            path.rename(going)  # atomic for readers
        except FileNotFoundError:
            return
        except OSError:
            going = path  # a mount point
        shutil.rmtree(going, ignore_errors=True)

    def _drop_cache(self, record: Record) -> None:
        """Delete the cache of a source that no other model uses."""
        if not any(other.key != record.key and other.cache_name == record.cache_name for other in self.records.all()):
            shutil.rmtree(self.cache_folder(record), ignore_errors=True)
        else:
            self._drop_entries(record)

    def _drop_entries(self, record: Record) -> None:
        """Delete revisions of a source that no model uses. Running downloads have a name that starts with a dot."""
        used = {other.entry for other in self.records.all() if other.cache_name == record.cache_name and other.entry}
        if any(
            other.cache_name == record.cache_name and other.state is ModelState.DOWNLOADING
            for other in self.records.all()
        ):
            return  # a download may be about to use any of them
        for path in self.cache_folder(record).glob("[!.]*"):
            if path.name not in used:
                shutil.rmtree(path, ignore_errors=True)


def cache_name(source: ModelSource) -> str:
    """Return the cache folder of a source. All revisions of a Hub model share one, such as a branch and its commit."""
    place = source.place
    identity = f"hub {place.repository}" if isinstance(place, HubLocation) else source.uri
    parts = [identity, *sorted(source.files)] if isinstance(place, HubLocation) else [identity, source.endpoint]
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


class ModelState(StrEnum):
    """How far a model is. The values stand in record files."""

    DOWNLOADING = "coming"
    INSTALLING = "placing"
    """Its files are being moved to its path."""
    READY = "there"


class Record(msgspec.Struct, frozen=True, rename={"cache_name": "shelf"}):
    """One model on this node. A small JSON file next to the models that survives a restart of the agent."""

    namespace: str
    name: str
    uri: str
    path: str
    cache_name: str
    """Name of the cache folder of its source."""
    state: ModelState = ModelState.DOWNLOADING
    revision: str = ""
    """A commit, or a digest of the object store's listing; "" if the source has neither."""
    entry: str = ""
    """The name of its entry in the cache folder."""
    files: dict[str, int] = msgspec.field(default_factory=dict)
    """Sizes of its files, by name."""
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Metadata that was read from the files."""
    reserved: bool = False
    """Its files are kept when it is deleted."""
    gone: bool = False
    """It was deleted and its files were kept."""

    @property
    def key(self) -> ModelKey:
        """Key of the model."""
        return self.namespace, self.name


class RecordStore:
    """All records. Safe for several threads, not for several processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: dict[ModelKey, Record] = {}
        self._lock = threading.RLock()

    def load(self) -> None:
        """Read the record files. Invalid files are ignored."""
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_temporary_files(self._folder)
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                record = msgspec.json.decode(path.read_bytes(), type=Record)
                self._all[record.key] = record

    def get(self, key: ModelKey) -> Record | None:
        """Return the record of a model."""
        return self._all.get(key)

    def all(self) -> list[Record]:
        """Return all records, ordered by key."""
        with self._lock:
            return [self._all[key] for key in sorted(self._all)]

    def put(self, record: Record) -> None:
        """Write a record atomically."""
        with self._lock:
            if self._all.get(record.key) == record:
                return
            write_atomically(self._path(record.key), msgspec.json.encode(record), mode=None)
            self._all[record.key] = record

    def drop(self, key: ModelKey) -> None:
        """Remove a record."""
        with self._lock:
            self._path(key).unlink(missing_ok=True)
            self._all.pop(key, None)

    def _path(self, key: ModelKey) -> Path:
        # A namespace and a name together may be too long for a file name.
        return self._folder / f"{hashlib.sha256('/'.join(key).encode()).hexdigest()[:32]}.json"


_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOTSUP}


def files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of all regular files; symbolic links are skipped, they may lead anywhere."""
    if folder.is_file():
        yield folder.name, folder
        return
    for above, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(above, name)
            if path.is_file() and not path.is_symlink():
                yield str(path.relative_to(folder)), path


def replace_files(path: Path, files: dict[str, Path]) -> None:
    """Make a folder hold exactly these files. Each is replaced atomically."""
    for name, file in files.items():
        to = path / name
        if to.exists() and not to.is_symlink() and to.samefile(file):
            continue
        if to.is_dir() and not to.is_symlink():
            shutil.rmtree(to)
        new = make_parents(path, name).with_name(f".{to.name}.headrace-new")
        new.unlink(missing_ok=True)
        link_or_copy(file, new)
        new.replace(to)
    for above, _, names in os.walk(path, topdown=False):
        for name in names:
            obsolete = Path(above, name)
            if str(obsolete.relative_to(path)) not in files:
                obsolete.unlink()
        if above != str(path) and not any(Path(above).iterdir()):
            Path(above).rmdir()
    make_readable(path)


def make_parents(folder: Path, name: str) -> Path:
    """Create the parent folders of a path in a folder, replacing files in their way. Return the path."""
    path = folder / name
    for above in reversed(path.relative_to(folder).parents):
        part = folder / above
        if part.is_symlink() or (part.exists() and not part.is_dir()):
            part.unlink()
        part.mkdir(parents=True, exist_ok=True)
    return path


def link_or_copy(file: Path, to: Path) -> None:
    """Hard-link a file; copy it if the file system has no hard links."""
    try:
        os.link(file, to)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(file, to)


def make_readable(path: Path) -> None:
    """Make a folder readable for pods, which run as other users."""
    for above, _, names in os.walk(path):
        add_mode(Path(above), 0o055)
        for name in names:
            add_mode(Path(above, name), 0o044)


def add_mode(path: Path, more: int) -> None:
    """Add permission bits that are missing."""
    mode = path.stat().st_mode
    if mode & more != more:
        path.chmod(mode | more)


def has_files(path: Path) -> bool:
    """Whether a path is more than empty folders."""
    return path.is_symlink() or not path.is_dir() or any(names for _, _, names in os.walk(path))


def remove_empty(path: Path) -> None:
    """Remove folders that have no files."""
    for above, _, _ in os.walk(path, topdown=False):
        Path(above).rmdir()
