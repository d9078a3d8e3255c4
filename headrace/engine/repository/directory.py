# SPDX-License-Identifier: Apache-2.0
"""Who serves: what every request looks up.

Read on the hot path with plain dictionary look-ups; written by `lifecycle` in one step of the loop, so that a request
sees a version either whole or not at all. Who holds a version it found may go on using it: a version retires after it
has left the directory, and then finishes what it had begun.

Where versions of a model share its traffic, something stands between its name and its versions (`Directory.lead`); it is
asked anew whenever versions come or go.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.engine.repository.contract import LoadedVersion


class ServedModel:
    """One model's versions that serve."""

    __slots__ = ("entry", "name", "newest", "versions")

    def __init__(self, name: str) -> None:
        self.name = name
        self.newest: LoadedVersion | None = None
        """The largest number that serves; None when none does."""
        self.entry: object | None = None
        """Where requests go that name no version: to the newest, or to what chooses one (`Directory.lead`). Has a
        version's `infer`, `infer_stream` and `express`."""
        self.versions: dict[str, LoadedVersion] = {}
        """By number as text. Replaced, never changed: who iterates it is safe."""


MakeEntry = Callable[[ServedModel], object]
"""Says where a model's requests go that name no version. Called with the versions there are, also when there are none."""


class Directory:
    """All models that serve at least one version."""

    __slots__ = ("_leads", "models")

    def __init__(self) -> None:
        self.models: dict[str, ServedModel] = {}
        self._leads: dict[str, MakeEntry] = {}

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
        self._enter(model)
        if versions:
            self.models[model.name] = model
        else:
            self.models.pop(model.name, None)

    def lead(self, name: str, make: MakeEntry | None) -> None:
        """From now on let `make` say where requests for a model go that name no version; None for the newest."""
        if make is None:
            self._leads.pop(name, None)
        else:
            self._leads[name] = make
        self._enter(self.models.get(name) or ServedModel(name))

    def _enter(self, model: ServedModel) -> None:
        make = self._leads.get(model.name)
        model.entry = model.newest if make is None else make(model)
