# SPDX-License-Identifier: Apache-2.0
"""Where the LoRA adapters of a model are found: in its folder of adapters, on the Hub, or registered by an operator.

An adapter is found by its name when a request names it. The protocols list and find adapters here, also those of a model
that is not loaded; the backend `llm` loads them. Knows no tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.core.names import check_name, is_name
from headrace.models.storage.locations import HUB_SCHEME, is_hub_name, parse_location

FOLDER, HUB = "adapters_folder", "adapters_hub"
"""The parameters of a model configuration."""
CONFIG = "adapter_config.json"
_WILDCARDS = frozenset("*?[]")


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Where one adapter is: in a folder of this machine, or in a repository of the Hub."""

    name: str
    folder: Path | None = None
    hub: str = ""
    """`organisation/name`, with `@revision` if the configuration has one; "" for a folder."""


@dataclass(frozen=True, slots=True)
class AdapterPlaces:
    """Where adapters of a model may come from."""

    folder: Path | None = None
    """Its subfolders are adapters."""
    hub: tuple[str, ...] = ()
    """Repositories that a request may name: `organisation/name`, `organisation/*`, each perhaps with `@revision`."""


def adapter_places(parameters: Mapping[str, str], version_folder: Path) -> AdapterPlaces:
    """Read the parameters of a model configuration; raise `InvalidArgument` for an entry that would allow too much."""
    folder = parameters.get(FOLDER, "").strip()
    hub = tuple(filter(None, (entry.strip() for entry in parameters.get(HUB, "").split(","))))
    for entry in hub:
        _check_hub_entry(entry)
    return AdapterPlaces((version_folder / folder).absolute() if folder else None, hub)


def _check_hub_entry(entry: str) -> None:
    pattern, _, revision = entry.partition("@")
    organisation, _, name = pattern.partition("/")
    plain = "".join("x" if character in _WILDCARDS else character for character in name)
    if _WILDCARDS & set(organisation) or not is_hub_name(f"{organisation}/{plain}"):
        raise InvalidArgument(
            f"parameter {HUB} has '{entry[:64]}': use organisation/name or organisation/*, with commas between; "
            "requests may download all repositories that it allows"
        )
    parse_location(f"{HUB_SCHEME}://{organisation}/{plain}" + (f"@{revision}" if "@" in entry else ""))


class AdapterLoader(Protocol):
    """Loads adapters of a model that serves. Thread-safe."""

    def load(self, source: AdapterSource, done: Callable[[HeadraceError | None], None]) -> None:
        """Read an adapter again, whether or not it is in memory; call `done` in any thread."""

    def forget(self, name: str) -> None:
        """Drop an adapter from memory. Requests that use it go on."""


class ModelAdapters:
    """The adapters of one model, but for those of its parameter `adapters`, which are always loaded. Thread-safe."""

    def __init__(self, model: str, places: AdapterPlaces) -> None:
        self.model = model
        self.places = places
        self.loader: AdapterLoader | None = None
        """While the model is loaded and loads adapters on demand."""
        self._registered: dict[str, AdapterSource] = {}

    def names(self) -> list[str]:
        """Return the names that can be listed, sorted: a wildcard of the Hub has none."""
        listed = {entry.partition("@")[0] for entry in self.places.hub}
        names = {name for name in listed if not _WILDCARDS & set(name)}
        names.update(tuple(self._registered))  # a copy: another thread may add one meanwhile
        if self.places.folder is not None:
            try:
                entries = list(self.places.folder.iterdir())
            except OSError:  # it may be made later
                entries = []
            names |= {path.name for path in entries if self._in_folder(path.name) is not None}
        return sorted(names)

    def find(self, name: str) -> AdapterSource | None:
        """Return where the adapter of a name is; None if this model has none of that name.

        The name is a client's: it is compared, and becomes a path only if it cannot leave the folder.
        """
        registered = self._registered.get(name)
        return registered or self._in_folder(name) or self._on_hub(name)

    def source(self, name: str, path: str) -> AdapterSource:
        """Return the adapter that an operator names by a path: below the folder of adapters, or an allowed repository."""
        if not is_hub_name(name):
            check_name(name, "adapter")
        folder = self.places.folder
        if folder is not None:
            try:
                base, chosen = folder.resolve(), (folder / path).resolve()
                inside = chosen != base and chosen.is_relative_to(base) and chosen.is_dir()
            except (OSError, ValueError):
                inside = False
            if inside:
                return AdapterSource(name, chosen)
        on_hub = self._on_hub(path)
        if on_hub is not None:
            return AdapterSource(name, hub=on_hub.hub)
        where = (
            f"'{folder}'" if folder is not None else f"a folder (parameter {FOLDER} of model '{self.model}' is not set)"
        )
        allowed = ", ".join(self.places.hub) or f"none (parameter {HUB})"
        raise InvalidArgument(
            f"lora_path {path[:128]!a} is neither a folder below {where} nor a repository of the Hub that model "
            f"'{self.model}' may load, which are: {allowed}"
        )

    def is_registered(self, name: str) -> bool:
        """Return whether an operator registered an adapter under this name."""
        return name in self._registered

    def register(self, source: AdapterSource) -> None:
        """Add an adapter, until it is removed or the server ends."""
        self._registered[source.name] = source

    def remove(self, name: str) -> None:
        """Remove an adapter that was registered."""
        self._registered.pop(name, None)

    def require_loader(self) -> AdapterLoader:
        """Return the loader; raise if the model cannot load adapters now."""
        if self.loader is None:
            raise FailedPrecondition(
                f"model '{self.model}' is not loaded: load it first, or send it a request, and try again"
            )
        return self.loader

    def _in_folder(self, name: str) -> AdapterSource | None:
        folder = self.places.folder
        if folder is None or not is_name(name):
            return None
        path = folder / name
        try:
            return AdapterSource(name, path) if (path / CONFIG).is_file() else None
        except OSError:
            return None

    def _on_hub(self, name: str) -> AdapterSource | None:
        if not is_hub_name(name):
            return None
        for entry in self.places.hub:
            pattern, at, revision = entry.partition("@")
            if not fnmatchcase(name, pattern):
                continue
            repository = name + at + revision
            try:
                parse_location(f"{HUB_SCHEME}://{repository}")
            except InvalidArgument:  # '..' in it, for example
                return None
            return AdapterSource(name, hub=repository)
        return None


class AdapterCatalog:
    """The adapters of all models of one server that load them on demand. Thread-safe.

    What an operator registered stays when a model is evicted and loaded again.
    """

    def __init__(self) -> None:
        self._models: dict[str, ModelAdapters] = {}
        self._lock = threading.Lock()

    def open(self, model: str, places: AdapterPlaces | None) -> ModelAdapters | None:
        """Return the adapters of a model that is being loaded; `places` is None for one without adapters on demand."""
        with self._lock:
            if places is None:
                self._models.pop(model, None)
                return None
            adapters = self._models.get(model)
            if adapters is None:
                adapters = self._models[model] = ModelAdapters(model, places)
            adapters.places = places
            return adapters

    def of(self, model: str) -> ModelAdapters | None:
        """Return the adapters of a model that was loaded; None if it has none on demand."""
        return self._models.get(model)
