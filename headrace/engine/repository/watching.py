# SPDX-License-Identifier: Apache-2.0
"""What changed between two scans, and whether it is finished: a folder that is still being copied is not taken.

Called by `control` after each scan of a polled repository. Turns snapshots into changes; knows no model that runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.engine.repository.scan import FoundModel, Snapshot


@dataclass(frozen=True, slots=True)
class Changes:
    """What to do after a scan."""

    serve: tuple[FoundModel, ...]
    """New or changed."""
    gone: tuple[str, ...]
    unsettled: bool
    """Something changed that was not taken yet: look again soon."""


class Watch:
    """Remembers what was taken, and what was seen but is not yet believed."""

    def __init__(self, settle_seconds: float) -> None:
        self._settle_seconds = settle_seconds
        self._taken: dict[str, FoundModel] = {}
        self._doubtful: dict[str, FoundModel | None] = {}

    def take(self, models: Mapping[str, FoundModel]) -> None:
        """At the start everything is taken as it is."""
        self._taken = dict(models)

    def compare(self, snapshot: Snapshot, now: float) -> Changes:
        """What a scan made at the wall-clock time `now` changes.

        New and changed models are taken when nothing in them was written for a while; by the time of the change, which
        copying cannot set back, or, since the file system's clock may be another machine's, when they look the same as at
        the last scan. What is missing must be missing twice: a folder that is replaced is missing for a moment.
        """
        serve, gone = [], []
        doubtful: dict[str, FoundModel | None] = {}
        for name, found in snapshot.models.items():
            if self._taken.get(name) == found:
                continue
            quiet = now - found.changed >= self._settle_seconds
            if quiet or self._doubtful.get(name) == found:
                self._taken[name] = found
                serve.append(found)
            else:
                doubtful[name] = found
        unknown = set(snapshot.unreadable)
        for name, taken in list(self._taken.items()):
            if name in snapshot.models or taken.folder.parent in unknown:
                continue
            if name in self._doubtful and self._doubtful[name] is None:
                del self._taken[name]
                gone.append(name)
            else:
                doubtful[name] = None
        self._doubtful = doubtful
        return Changes(tuple(serve), tuple(gone), bool(doubtful))
