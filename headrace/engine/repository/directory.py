# SPDX-License-Identifier: Apache-2.0
"""Who serves: what every request looks up.

Read on the hot path with plain dictionary look-ups; written by `lifecycle` in one step of the loop, so that a request
sees a version either whole or not at all. Who holds a version it found may go on using it: a version retires after it
has left the directory, and then finishes what it had begun.
"""

from __future__ import annotations

from headrace.engine.repository.contract import LoadedVersion


class ServedModel:
    """One model's versions that serve."""

    __slots__ = ("name", "newest", "versions")

    def __init__(self, name: str) -> None:
        self.name = name
        self.newest: LoadedVersion | None = None
        """The largest number that serves; None when none does."""
        self.versions: dict[str, LoadedVersion] = {}
        """By number as text. Replaced, never changed: who iterates it is safe."""


class Directory:
    """All models that serve at least one version."""

    __slots__ = ("models",)

    def __init__(self) -> None:
        self.models: dict[str, ServedModel] = {}

    def find(self, name: str, version: str = "") -> LoadedVersion | None:
        """The version of a model, the newest for ""; None if it does not serve."""
        model = self.models.get(name)
        if model is None:
            return None
        return model.versions.get(version) if version else model.newest

    def put(self, model: ServedModel, versions: dict[int, LoadedVersion]) -> None:
        """Let these versions serve, and no others. From the loop's thread."""
        model.versions = {str(number): versions[number] for number in sorted(versions)}
        model.newest = versions[max(versions)] if versions else None
        if versions:
            self.models[model.name] = model
        else:
            self.models.pop(model.name, None)
