# SPDX-License-Identifier: Apache-2.0
"""Where every version of every model stands: what the protocols show as status, index and reason.

Written by `lifecycle` from the loop's thread; the progress of a load may come from any thread. Knows what happened, not
how to make it happen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headrace.core.clock import Clock
from headrace.core.telemetry.progress import ProgressEvent


class State(Enum):
    """As the protocols call them; `MODEL_` in front in the oldest."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    UNLOADING = "UNLOADING"


UNLOADED = "unloaded"
"""The reason of a version that was loaded and is gone because it was told to go."""


@dataclass(eq=False, slots=True)
class VersionState:
    """Where one version stands. A change of state is a new object, so that who waited can see that it was overtaken."""

    name: str
    version: int | None
    """None: the model as a whole, when it failed before its versions were known."""
    state: State
    reason: str
    since: float
    """Wall-clock time of the change."""
    progress: ProgressEvent | None = None
    """The last that its load reported."""
    load_seconds: float | None = None
    """How long its last successful load took."""

    @property
    def version_text(self) -> str:
        """As protocols write it; "" for the model as a whole."""
        return "" if self.version is None else str(self.version)


class States:
    """All of them. Nothing is forgotten: a removed version stays listed, with its reason."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._models: dict[str, dict[int | None, VersionState]] = {}

    def put(
        self, name: str, version: int | None, state: State, reason: str = "", load_seconds: float | None = None
    ) -> VersionState:
        """Say where a version stands from now on."""
        versions = self._models.setdefault(name, {})
        before = versions.get(version)
        if load_seconds is None and before is not None and state is not State.LOADING:
            load_seconds = before.load_seconds
        versions[version] = entry = VersionState(name, version, state, reason, self._clock.wall(), None, load_seconds)
        return entry

    def get(self, name: str, version: int | None) -> VersionState | None:
        """Where a version stands; None if it was never heard of."""
        return self._models.get(name, {}).get(version)

    def of(self, name: str) -> list[VersionState]:
        """All versions of a model, the lowest first; the model as a whole before them."""
        return sorted(self._models.get(name, {}).values(), key=_order)

    def names(self) -> list[str]:
        """Every model that was ever heard of."""
        return sorted(self._models)

    def all(self) -> list[VersionState]:
        """Everything, by name and version."""
        return [entry for name in self.names() for entry in self.of(name)]

    def drop(self, name: str, version: int | None) -> None:
        """Forget a version."""
        self._models.get(name, {}).pop(version, None)

    def reset(self, name: str) -> None:
        """Forget a model's past, as one that is added again begins anew."""
        self._models.pop(name, None)


def _order(entry: VersionState) -> int:
    return -1 if entry.version is None else entry.version
