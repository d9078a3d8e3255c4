# SPDX-License-Identifier: Apache-2.0
"""The models on a node's disk: whose folder is whose, whether a model is whole, how it gets to its folder and out of it.

Used by `fetching`, in threads, one at a time for each model. Below the root, beside the models' own folders, `.headrace` has
a folder for each source (a cache of `storage`), the records, and what is about to be moved. A model's folder holds hard
links to the files of the cache: models of one source take the room of one, and each can be deleted by itself. An update
replaces files one by one in the folder that is there, because pods that run have that very folder mounted.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.fleet.agent.linking import (
    allow,
    files_of,
    has_files,
    let_others_read,
    link,
    made,
    remove_empty,
    replace_files,
)
from headrace.fleet.agent.marks import ModelKey, shown
from headrace.fleet.agent.records import Record, Records
from headrace.fleet.agent.sources import Source
from headrace.models.storage.cache_room import BRINGING, bytes_below, on_disk
from headrace.models.storage.locations import HubPlace, public_text
from headrace.models.storage.problems import NoRoom, readable_bytes

OWN = ".headrace"


class Shelf:
    """The folder of all models of a node."""

    def __init__(self, root: Path, keep_free_bytes: int = 0) -> None:
        self.root = root
        self.records = Records(root / OWN / "models")
        self._keep_free = keep_free_bytes
        self._promised: dict[ModelKey, int] = {}
        self._lock = threading.RLock()
        self._alone: IO[bytes] | None = None

    def open(self) -> None:
        """Make the folders, read the records. Raises FailedPrecondition."""
        try:
            for name in ("cache", "new"):
                (self.root / OWN / name).mkdir(parents=True, exist_ok=True)
            self._alone = (self.root / OWN / "agent.lock").open("ab")
            fcntl.flock(self._alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in (self.root / OWN / "new").iterdir():
                shutil.rmtree(left, ignore_errors=True)
            self.records.load()
            known = {each.shelf for each in self.records.all()}
            for left in (self.root / OWN / "cache").iterdir():
                if left.name not in known:
                    shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:
            self.close()
            raise FailedPrecondition(f"another agent has {self.root}; stop it, or name another folder") from None
        except OSError as error:
            raise FailedPrecondition(
                f"{self.root} cannot be written to ({os.strerror(error.errno or 0)}); mount the node's folder for models "
                "there, or name another one by --models-root"
            ) from None

    def close(self) -> None:
        """Let another agent have it."""
        if self._alone is not None:
            self._alone.close()

    # Whose is what

    def claim(self, key: ModelKey, source: Source, *, reserved: bool) -> Record:
        """Say that a model will be at its path; from here on no other may. Raises InvalidArgument, FailedPrecondition."""
        path = self._checked(source.path)
        with self._lock:
            before = self.records.get(key)
            for other in self.records.all():
                if other.key != key:
                    self._no_clash(other, path, source.uri)
            if before is not None and before.path != str(path):
                if not before.gone:
                    self._empty(before)
                before = replace(before, path="", files={})
            if self.is_foreign(source.path):
                raise FailedPrecondition(
                    f"{path} has files that this agent did not bring; move them away, or serve them as they are by "
                    f"storageUri local://{path}"
                )
            coming = Record(*key, source.uri, str(path), shelf_name(source), reserved=reserved)
            if before is not None and (before.uri, before.path) == (source.uri, str(path)):
                coming = replace(before, reserved=reserved, gone=False)
            elif before is not None:
                coming = replace(coming, files=before.files)  # whichever source they are from, they are ours
            self.records.put(coming)
            if before is not None and before.shelf != coming.shelf:
                self._drop_shelf(before)
            return coming

    def is_foreign(self, said: str) -> bool:
        """Whether there are files at a path that no model of ours has brought. Raises InvalidArgument."""
        path = self._checked(said)
        with self._lock:
            return not self._is_ours(path) and path.exists() and has_files(path)

    def adopt(
        self,
        key: ModelKey,
        source: Source,
        files: dict[str, int],
        revision: str,
        config: dict[str, Any],
        *,
        reserved: bool,
    ) -> Record:
        """Say that the files at a path are ours from here on, and a model."""
        path = self._checked(source.path)
        with self._lock:
            for other in self.records.all():
                if other.key != key:
                    self._no_clash(other, path, source.uri)
            state: Literal["there"] = "there"
            where = (source.uri, str(path), shelf_name(source))
            record = Record(*key, *where, state, revision, "", files, config, reserved)
            self.records.put(record)
            return record

    def is_whole(self, record: Record) -> bool:
        """Whether all files of a model are there, as long as they were."""
        if record.state != "there":
            return False
        folder = Path(record.path)
        try:
            return all((folder / name).stat().st_size == size for name, size in record.files.items())
        except OSError:
            return False

    def cache(self, record: Record) -> Path:
        """Where the files of a source come into."""
        return self.root / OWN / "cache" / record.shelf

    # Room

    def promise(self, record: Record, size: int | None) -> None:
        """Keep room for a download, of which some may be there. Raises NoRoom with the numbers."""
        if size is None:
            return
        with self._lock:
            left = self._left(record, size)
            others = sum(bytes_ for key, bytes_ in self._promised.items() if key != record.key)
            free = shutil.disk_usage(self.root).free
            if left and left + others + self._keep_free > free:
                taken = f", {readable_bytes(others)} of it promised to other downloads" if others else ""
                raise NoRoom(
                    f"there is no room for {public_text(record.uri)}: it needs {readable_bytes(left)}, {self.root} has "
                    f"{readable_bytes(free)} free{taken}, and {readable_bytes(self._keep_free)} are to stay free; delete "
                    "models, choose other nodes by spec.storage.nodeSelector, or give the node a larger disk"
                )
            self._promised[record.key] = left

    def came(self, key: ModelKey, left: int) -> None:
        """So much of a promise is still to come; 0 at its end."""
        with self._lock:
            if left > 0 and key in self._promised:
                self._promised[key] = left
            else:
                self._promised.pop(key, None)

    def _left(self, record: Record, size: int) -> int:
        folder = self.cache(record)
        if any(
            each.shelf == record.shelf and each.entry and each.revision == record.revision != ""
            for each in self._there()
        ):
            return 0
        partial = sum(bytes_below(each, on_disk) for each in folder.glob(f"{BRINGING}*") if each.is_dir())
        return max(0, size - partial)

    # In and out

    def place(self, record: Record, brought: Path) -> Record:
        """Put what was brought into the model's folder. What was there of it before goes."""
        path = Path(record.path)
        files = dict(files_of(brought))
        if not files:
            raise FailedPrecondition(f"there are no files at {public_text(record.uri)}")
        entry = brought.relative_to(self.cache(record)).parts[0]
        sizes = {name: file.stat().st_size for name, file in files.items()}
        # Written before the first file: who is killed from here on leaves a folder that is known to be ours.
        self.records.put(replace(record, state="placing", entry=entry))
        if path.exists() and has_files(path):
            replace_files(path, files)
        else:
            self._move_in(path, record.key, files)
        placed = replace(record, state="there", entry=entry, files=sizes)
        self.records.put(placed)
        with self._lock:
            self._drop_entries(placed)
        return placed

    def remove(self, key: ModelKey, *, keep: bool = False) -> None:
        """Delete a model's files, unless they are reserved or another model's as well; and what came for it.

        `keep`: they are somebody else's from here on.
        """
        with self._lock:
            record = self.records.get(key)
            self._promised.pop(key, None)
            if record is None or record.gone:
                return
            if record.reserved and not keep:
                self.records.put(replace(record, gone=True))
                return
            if not keep:
                self._empty(record)
            self.records.drop(key)
            self._drop_shelf(record)

    def _checked(self, said: str) -> Path:
        path = Path(os.path.normpath(said))
        inside = path.is_relative_to(self.root) and path != self.root
        if not inside or ".." in Path(said).parts or path.is_relative_to(self.root / OWN):
            raise InvalidArgument(
                f"spec.storage.path {said} is not below {self.root}, where this node has its models: write "
                f"{self.root}/NAME, or run the agent with another --models-root"
            )
        try:
            if not path.parent.resolve().is_relative_to(self.root.resolve()):
                raise InvalidArgument(f"spec.storage.path {said} leads out of {self.root} through a link")
        except (OSError, RuntimeError):
            raise InvalidArgument(f"spec.storage.path {said} cannot be followed") from None
        return path

    def _no_clash(self, other: Record, path: Path, uri: str) -> None:
        theirs = Path(other.path)
        if theirs == path and other.uri != uri:
            what = "files of the deleted model" if other.gone else "model"
            raise InvalidArgument(
                f"spec.storage.path {path} has the {what} {shown(other.key)}, which comes from another place; choose another"
            )
        if theirs != path and (theirs.is_relative_to(path) or path.is_relative_to(theirs)):
            raise InvalidArgument(
                f"spec.storage.path {path} and {theirs} of {shown(other.key)} are one inside the other; choose another"
            )

    def _is_ours(self, path: Path) -> bool:
        return any(each.path == str(path) for each in self.records.all())

    def _there(self) -> list[Record]:
        return [each for each in self.records.all() if each.state != "coming"]

    def _move_in(self, path: Path, key: ModelKey, files: dict[str, Path]) -> None:
        new = self.root / OWN / "new" / hashlib.sha256("/".join(key).encode()).hexdigest()[:32]
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        for name, file in files.items():
            link(file, made(new, name))
        let_others_read(new)
        path.parent.mkdir(parents=True, exist_ok=True)
        for above in path.parents:
            if above != self.root and above.is_relative_to(self.root):
                allow(above, 0o055)
        if path.is_dir() and not path.is_symlink():
            remove_empty(path)
        new.rename(path)

    def _empty(self, record: Record) -> None:
        """Delete the model's folder, unless another record is of the same one."""
        path = Path(record.path)
        if any(each.key != record.key and each.path == record.path for each in self.records.all()):
            return
        if record.state == "coming" and not record.files:
            return  # nothing of ours is there yet
        going = self.root / OWN / "new" / f"going-{hashlib.sha256(record.path.encode()).hexdigest()[:32]}"
        shutil.rmtree(going, ignore_errors=True)
        try:
            path.rename(going)  # at once, for whoever looks
        except FileNotFoundError:
            return
        except OSError:
            going = path  # a mount of its own
        shutil.rmtree(going, ignore_errors=True)

    def _drop_shelf(self, record: Record) -> None:
        """Delete what came from a source, once no model is of it."""
        if not any(each.key != record.key and each.shelf == record.shelf for each in self.records.all()):
            shutil.rmtree(self.cache(record), ignore_errors=True)
        else:
            self._drop_entries(record)

    def _drop_entries(self, record: Record) -> None:
        """Delete states of a source that no model is of any more. What is still coming has a name with a dot."""
        used = {each.entry for each in self.records.all() if each.shelf == record.shelf and each.entry}
        if any(each.shelf == record.shelf and each.state == "coming" for each in self.records.all()):
            return  # it may be about to use any of them
        for path in self.cache(record).glob("[!.]*"):
            if path.name not in used:
                shutil.rmtree(path, ignore_errors=True)


def shelf_name(source: Source) -> str:
    """The folder of a source: one for all revisions of a model, so that those who name a branch and its commit share it."""
    place = source.place
    what = f"hub {place.repository}" if isinstance(place, HubPlace) else source.uri
    parts = [what, *sorted(source.files)] if isinstance(place, HubPlace) else [what, source.endpoint]
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
