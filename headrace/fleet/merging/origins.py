# SPDX-License-Identifier: Apache-2.0
"""Who said each field of a pod: the runtime, the service, the accelerator class, or nobody (`default`).

Made by `components`, read by explaining. Worked out when it is first asked for: planning five hundred services asks never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from headrace.fleet.merging.tables import PLAIN, POD, Table
from headrace.fleet.words import Document

RUNTIME, SERVICE, ACCELERATOR, DEFAULT = "runtime", "service", "accelerator", "default"


class Sources(NamedTuple):
    """A pod and what each side said of it."""

    pod: Document
    service: Document
    runtime: Document
    accelerated: tuple[str, ...]
    """Fields, with all below them, that the accelerator class decided."""


class Origins(Mapping[str, str]):
    """Field (`leader.containers[ome-container].image`) to origin, in the order of the pod."""

    def __init__(self, sources: Callable[[], Mapping[str, Sources]]) -> None:
        self._sources = sources

    @cached_property
    def _known(self) -> dict[str, str]:
        return {
            f"{name}.{path}": origin
            for name, each in self._sources().items()
            for path, origin in _origins(each).items()
        }

    def __getitem__(self, path: str) -> str:
        return self._known[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"Origins({self._known})"


def _origins(sources: Sources) -> dict[str, str]:
    service, runtime = flat(sources.service, POD), flat(sources.runtime, POD)
    found = {}
    for path, value in flat(sources.pod, POD).items():
        if any(path == each or path.startswith((f"{each}.", f"{each}[")) for each in sources.accelerated):
            found[path] = ACCELERATOR
        elif path in service and path in runtime and _joined(value, runtime[path], service[path]):
            found[path] = f"{RUNTIME}, {SERVICE}"
        elif path in service:
            found[path] = SERVICE
        else:
            found[path] = RUNTIME if path in runtime else DEFAULT
    return found


def _joined(value: Any, first: Any, second: Any) -> bool:
    """Whether a list is two lists, one behind the other: arguments of a container and of its runner."""
    lists = isinstance(first, list) and isinstance(second, list) and bool(first) and bool(second)
    return lists and value == [*first, *second]


def flat(document: Document, table: Table = PLAIN) -> dict[str, Any]:
    """Every field of a document by its path. Items of keyed lists go by their key, texts of a list together."""
    found: dict[str, Any] = {}
    _flatten(document, table, "", found)
    return found


def _flatten(document: Document, table: Table, prefix: str, found: dict[str, Any]) -> None:
    for name, value in document.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            _flatten(value, table.maps.get(name, PLAIN), f"{path}.", found)
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            key, inner = table.lists.get(name, (lambda _: None, PLAIN))
            for number, item in enumerate(value):
                known = key(item)
                _flatten(item, inner, f"{path}[{number if known is None else known}].", found)
        elif value is not None:
            found[path] = value
