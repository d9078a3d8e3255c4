# SPDX-License-Identifier: Apache-2.0
"""What the agent knows of the models that it has brought: a small file each, below the folder of all models.

Used by `shelf`. It outlives the agent, so that one that starts again knows which folders are its own, which models were
deleted meanwhile, and what need not be downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.fleet.agent.marks import ModelKey


@dataclass(frozen=True)
class Record:
    """One model on this node."""

    namespace: str
    name: str
    uri: str
    path: str
    shelf: str
    """The folder of the cache that its files come into: one for each source."""
    state: Literal["coming", "placing", "there"] = "coming"
    revision: str = ""
    """A commit, or a digest of the store's listing; "" where the source has no such thing."""
    entry: str = ""
    """The name of its entry in the folder of the cache."""
    files: dict[str, int] = field(default_factory=dict)
    """Sizes of its files, by name."""
    config: dict[str, Any] = field(default_factory=dict)
    """What was read of the files."""
    reserved: bool = False
    """Its files stay when it goes."""
    gone: bool = False
    """It is no more, and its files have stayed."""

    @property
    def key(self) -> ModelKey:
        """The model's."""
        return self.namespace, self.name


class Records:
    """All of them. For several threads, not for several processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: dict[ModelKey, Record] = {}
        self._lock = threading.RLock()

    def load(self) -> None:
        """Read what is there. A file that is none of ours, or half, is as if it were not there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                record = msgspec.json.decode(path.read_bytes(), type=Record)
                self._all[record.key] = record

    def get(self, key: ModelKey) -> Record | None:
        """That of a model."""
        return self._all.get(key)

    def all(self) -> list[Record]:
        """All, by name."""
        with self._lock:
            return [self._all[key] for key in sorted(self._all)]

    def put(self, record: Record) -> None:
        """Write one, or write it anew. Whole or not at all."""
        with self._lock:
            if self._all.get(record.key) == record:
                return
            path = self._path(record.key)
            new = path.with_suffix(".new")
            with new.open("wb") as file:
                file.write(msgspec.json.encode(record))
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
            self._all[record.key] = record

    def drop(self, key: ModelKey) -> None:
        """Forget one."""
        with self._lock:
            self._path(key).unlink(missing_ok=True)
            self._all.pop(key, None)

    def _path(self, key: ModelKey) -> Path:
        # Names of models fit into names of files, but a namespace and a name together may not.
        return self._folder / f"{hashlib.sha256('/'.join(key).encode()).hexdigest()[:32]}.json"
