# SPDX-License-Identifier: Apache-2.0
"""The directory of loaded versions, which every request looks up; and the interface for loading a version.

Requests read it with plain dictionary lookups. `lifecycle` writes it in one step of the event loop, so a request sees a
version either completely or not at all. A version is retired after it has left the directory, so a request that has found it
can still use it.

With a traffic split, requests without a version go to the split instead of the newest version (`Directory.set_default`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from headrace.backends.contract import ModelFiles
from headrace.core.telemetry.progress import Reporter
from headrace.models.config.types import ModelConfig


class LoadedVersion(Protocol):
    """A loaded version of a model."""

    @property
    def config(self) -> ModelConfig:
        """The configuration it was loaded with."""

    @property
    def version(self) -> int:
        """The version number."""

    @property
    def in_use(self) -> bool:
        """Whether a request is in flight, or a sequence of requests is open."""

    @property
    def last_used_ns(self) -> int:
        """When the last request ended, by the monotonic clock; 0 if there was none."""

    async def retire(self, grace_seconds: float) -> None:
        """Wait for requests in flight, cancel them when the grace period is over, and free everything.

        Called once, after the version has left the directory; its memory is free when this returns.
        """


LoadVersion = Callable[[ModelConfig, ModelFiles, Reporter], Awaitable[LoadedVersion]]
"""Load a version and warm it up; it can serve when this returns.

Raises a `HeadraceError` with a message for the operator; any other exception is only logged. Uses threads of its own. Frees
what it has loaded so far if it is cancelled.
"""


class ServedModel:
    """The versions of one model that serve."""

    __slots__ = ("default", "name", "newest", "versions")

    def __init__(self, name: str) -> None:
        self.name = name
        self.newest: LoadedVersion | None = None
        """The version with the largest number; None if no version serves."""
        self.default: object | None = None
        """Receives requests without a version: the newest version, or a traffic split (`Directory.set_default`). Has
        `infer`, `infer_stream` and `express`."""
        self.versions: dict[str, LoadedVersion] = {}
        """By number as text. The dictionary is replaced and never changed, so it is safe to iterate."""


MakeDefault = Callable[[ServedModel], object]
"""Returns the receiver of a model's requests without a version. Called whenever versions change, also if there are none."""


class Directory:
    """All models with at least one version that serves."""

    __slots__ = ("_default_makers", "models")

    def __init__(self) -> None:
        self.models: dict[str, ServedModel] = {}
        self._default_makers: dict[str, MakeDefault] = {}

    def find(self, name: str, version: str = "") -> LoadedVersion | None:
        """Return a version of a model, the newest for ""; None if it does not serve."""
        model = self.models.get(name)
        if model is None:
            return None
        return model.versions.get(version) if version else model.newest

    def put(self, model: ServedModel, versions: dict[int, LoadedVersion]) -> None:
        """Replace the versions of a model. Call it in the event loop's thread."""
        model.versions = {str(number): versions[number] for number in sorted(versions)}
        model.newest = versions[max(versions)] if versions else None
        self._update_default(model)
        if versions:
            self.models[model.name] = model
        else:
            self.models.pop(model.name, None)

    def set_default(self, name: str, make: MakeDefault | None) -> None:
        """Send a model's requests without a version to what `make` returns; None for the newest version."""
        if make is None:
            self._default_makers.pop(name, None)
        else:
            self._default_makers[name] = make
        self._update_default(self.models.get(name) or ServedModel(name))

    def _update_default(self, model: ServedModel) -> None:
        make = self._default_makers.get(model.name)
        model.default = model.newest if make is None else make(model)
