# SPDX-License-Identifier: Apache-2.0
"""Documents of this machine's fleet: in memory, and on disk one file each, written whole.

A file that cannot be read is left where it is and told in the log; the others count. What cannot be written is not taken:
the caller hears of it, and what was there stays.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.fleet.names import API_VERSION
from headrace.fleet.schema.kinds import KINDS
from headrace.fleet.status.conditions import time_text
from headrace.fleet.words import DEFAULT_NAMESPACE, Document, kind_of, labels_of, name_of, part, text, whole

log = logging.getLogger("headrace.fleet")

Key = tuple[str, str, str]
"""Kind, namespace ("" where a kind has none), name."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""What names of objects are made of; it cannot leave a folder."""
NAMESPACED = frozenset(each.name for each in KINDS if each.namespaced) | {"ConfigMap", "Secret"}
CORE = frozenset({"ConfigMap", "Secret", "Namespace"})
"""Kinds that are no fleet's own and that services may name."""


def utc_now() -> datetime:
    """The time of this machine."""
    return datetime.now(UTC)


class Store:
    """All documents. Used from the loop's thread only."""

    def __init__(self, folder: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._folder = folder
        self.on_change: Callable[[Document], None] = lambda _: None
        self._now = now
        self._all: dict[Key, Document] = {}
        self._edited: dict[Key, int] = {}
        """By document: the version that a user wrote last, as far as this daemon has seen it."""
        self._version = 0

    def load(self) -> None:
        """Read what is on disk."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in sorted(self._folder.glob("*/*/*.json")):
            found = read_json(path)
            if found is None or not name_of(found):
                log.error("%s cannot be read and is left out: look at it, or apply its document again", path)
                continue
            self._all[key_of(found)] = found
            version = text(found, "metadata", "resourceVersion")
            self._version = max(self._version, int(version) if version.isdecimal() else 0)

    def all(self, kind: str = "", namespace: str = "", selector: Mapping[str, str] | None = None) -> list[Document]:
        """Documents by namespace and name."""
        return [
            each
            for key, each in sorted(self._all.items())
            if (not kind or key[0] == kind)
            and (not namespace or key[1] == namespace)
            and all(labels_of(each).get(name) == value for name, value in (selector or {}).items())
        ]

    def get(self, kind: str, namespace: str, name: str) -> Document | None:
        """One document."""
        return self._all.get((kind, namespace if kind in NAMESPACED else "", name))

    def applied(self, document: Document, *, dry_run: bool = False) -> tuple[Document, str]:
        """Take what a user wrote. (as it is now, `created` | `configured` | `unchanged`). Raises FailedPrecondition."""
        if not all(_NAME.fullmatch(each) for each in (name_of(document), key_of(document)[1] or "default")):
            raise InvalidArgument(
                "names are lower-case letters, digits, '-' and '.', and begin and end with a letter or a digit"
            )
        before = self._all.get(key_of(document))
        metadata = {
            name: value
            for name, value in part(document, "metadata").items()
            if name in ("name", "namespace", "labels", "annotations") and value
        }
        if kind_of(document) in NAMESPACED:
            metadata.setdefault("namespace", DEFAULT_NAMESPACE)
        body = {name: value for name, value in document.items() if name not in ("metadata", "status")}
        if before is not None and _written(before) == (body, metadata):
            return before, "unchanged"
        made: dict[str, Any] = {**body, "metadata": metadata}
        if before is None:
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": time_text(self._now()), "generation": 1}
        else:
            same = _written(before)[0] == body
            metadata |= {
                name: part(before, "metadata").get(name)
                for name in ("uid", "creationTimestamp", "deletionTimestamp")
                if part(before, "metadata").get(name)
            }
            metadata["generation"] = (whole(before, "metadata", "generation") or 0) + (0 if same else 1)
            if "status" in before:
                made["status"] = before["status"]
        return made if dry_run else self._edit(made), "created" if before is None else "configured"

    def change(self, document: Document) -> Document:
        """Keep a document whose spec may be another. Raises FailedPrecondition."""
        before = self._all.get(key_of(document))
        changed = before is None or part(before, "spec") != part(document, "spec")
        generation = (whole(document, "metadata", "generation") or 0) + (1 if changed else 0)
        return self._edit({**document, "metadata": {**part(document, "metadata"), "generation": generation}})

    def edited_since(self, document: Document, version: str) -> bool:
        """Whether a user wrote it after a version. The status, which changes all the time, does not count."""
        return version.isdecimal() and int(version) < self._edited.get(key_of(document), 0)

    def told(self, document: Document) -> None:
        """Keep a document with another status. One that cannot be written counts all the same: it is made anew."""
        try:
            self._put(document, lasting=False)
        except FailedPrecondition as error:
            log.error("%s", error.message)
            self._all[key_of(document)] = document

    def marked(self, document: Document) -> Document:
        """The document, from now on being deleted."""
        metadata = {**part(document, "metadata")}
        metadata.setdefault("deletionTimestamp", time_text(self._now()))
        return self._edit({**document, "metadata": metadata})

    def remove(self, document: Document) -> None:
        """Forget it."""
        key = key_of(document)
        self._edited.pop(key, None)
        if self._all.pop(key, None) is not None:
            self._path(key).unlink(missing_ok=True)
            self.on_change(document)

    def _edit(self, document: Mapping[str, Any]) -> Document:
        made = self._put(document)
        self._edited[key_of(made)] = int(text(made, "metadata", "resourceVersion"))
        return made

    def _put(self, document: Mapping[str, Any], *, lasting: bool = True) -> Document:
        self._version += 1
        made = {**document, "metadata": {**part(document, "metadata"), "resourceVersion": str(self._version)}}
        key = key_of(made)
        write_json(self._path(key), made, lasting=lasting)
        self._all[key] = made
        self.on_change(made)
        return made

    def _path(self, key: Key) -> Path:
        return self._folder / key[0] / (key[1] or "_") / f"{key[2]}.json"


def key_of(document: Document) -> Key:
    """Where it stands."""
    kind = kind_of(document)
    namespace = text(document, "metadata", "namespace") or DEFAULT_NAMESPACE
    return kind, namespace if kind in NAMESPACED else "", name_of(document)


def takes(document: Document) -> bool:
    """Whether a document is of a kind that this machine's fleet keeps."""
    if text(document, "apiVersion") == API_VERSION:
        return any(each.name == kind_of(document) for each in KINDS)
    return text(document, "apiVersion") == "v1" and kind_of(document) in CORE


def read_json(path: Path) -> dict[str, Any] | None:
    """What a file says; None if there is none, or nothing that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, content: Any, *, lasting: bool = True) -> None:
    """Whole or not at all, for its owner alone. Raises FailedPrecondition that says what is in the way.

    `lasting`: also if the machine loses its power in the next moment. What is told of processes need not be: it survives
    every kill as it is, and without power there are no processes; waiting for the disk is what a cold start waits for.
    """
    written = json.dumps(content)  # all of it, before a file is begun that would be left there
    fresh = path.parent / f".{path.name}.new"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(written)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        advice = "make room on its disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "look at its rights"
        raise FailedPrecondition(f"{path} cannot be written: {os.strerror(error.errno or 0)}; {advice}") from None


def each_folder(folder: Path) -> Iterator[Path]:
    """The folders in a folder."""
    if folder.is_dir():
        yield from sorted(each for each in folder.iterdir() if each.is_dir())


def _written(document: Document) -> tuple[dict[str, Any], dict[str, Any]]:
    metadata = {
        name: value
        for name, value in part(document, "metadata").items()
        if name in ("name", "namespace", "labels", "annotations")
    }
    return {name: value for name, value in document.items() if name not in ("metadata", "status")}, metadata
