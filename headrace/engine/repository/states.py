# SPDX-License-Identifier: Apache-2.0
"""The state of every version of every model, with its reason: shown by the protocols as status and index.

`lifecycle` writes it in the event loop's thread; the progress of a load may come from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headrace.core.clock import Clock
from headrace.core.telemetry.progress import ProgressEvent


class State(Enum):
    """The states of the protocols; the oldest protocol adds the prefix `MODEL_`."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    UNLOADING = "UNLOADING"


UNLOADED = "unloaded"
"""The reason of a version that was unloaded on request."""


@dataclass(eq=False, slots=True)
class VersionState:
    """The state of one version. Each change creates a new object, so that a waiting task can detect a later change."""

    name: str
    version: int | None
    """None: the model as a whole, if it failed before its versions were known."""
    state: State
    reason: str
    since: float
    """Unix time of the change."""
    progress: ProgressEvent | None = None
    """The last progress of its load."""
    load_seconds: float | None = None
    """Duration of its last successful load."""

    @property
    def version_text(self) -> str:
        """The version as text; "" for the model as a whole."""
        return "" if self.version is None else str(self.version)


class States:
    """The states of all versions. A removed version stays listed, with its reason."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._models: dict[str, dict[int | None, VersionState]] = {}

    def put(
        self, name: str, version: int | None, state: State, reason: str = "", load_seconds: float | None = None
    ) -> VersionState:
        """Set the state of a version."""
        versions = self._models.setdefault(name, {})
        before = versions.get(version)
        if load_seconds is None and before is not None and state is not State.LOADING:
            load_seconds = before.load_seconds
        versions[version] = entry = VersionState(name, version, state, reason, self._clock.wall(), None, load_seconds)
        return entry

    def get(self, name: str, version: int | None) -> VersionState | None:
        """Return the state of a version; None if it is not known."""
        return self._models.get(name, {}).get(version)

    def of(self, name: str) -> list[VersionState]:
        """Return the states of a model's versions, the lowest first; before them that of the model as a whole."""
        return sorted(self._models.get(name, {}).values(), key=_order)

    def names(self) -> list[str]:
        """Return the names of all known models."""
        return sorted(self._models)

    def all(self) -> list[VersionState]:
        """Return all states, by name and version."""
        return [entry for name in self.names() for entry in self.of(name)]

    def drop(self, name: str, version: int | None) -> None:
        """Remove the state of a version."""
        self._models.get(name, {}).pop(version, None)

    def reset(self, name: str) -> None:
        """Remove all states of a model, when it is added again."""
        self._models.pop(name, None)


def _order(entry: VersionState) -> int:
    return -1 if entry.version is None else entry.version
