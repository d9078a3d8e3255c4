# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' strategic merge over plain documents, and which document each merged field comes from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from headrace.platforms.kubernetes_client.objects import Document

Key = Callable[[Document], Hashable]


def _by_field(name: str) -> Key:
    def key(item: Document) -> Hashable:
        value = item.get(name)
        return value if isinstance(value, str | int) else None

    return key


def _by_port(item: Document) -> Hashable:
    """Return the key of a port: its number and protocol, since a container may use both TCP and UDP."""
    number, protocol = item.get("containerPort"), item.get("protocol") or "TCP"
    if not isinstance(number, int):
        return None
    return number if protocol == "TCP" else f"{number}/{protocol}"


@dataclass(frozen=True)
class MergeRules:
    """How the fields of a mapping merge."""

    lists: Mapping[str, tuple[Key, MergeRules]] = field(default_factory=dict)
    maps: Mapping[str, MergeRules] = field(default_factory=dict)
    alternatives: frozenset[str] = frozenset()
    """Fields of which only one may be set."""
    alternatives_but: str = ""
    """If set, all fields but this one are alternatives."""

    def excluded(self, patch: Document) -> Callable[[str], bool]:
        """Return a predicate for fields of the base that an alternative in the patch replaces."""
        if self.alternatives_but:
            chosen = {name for name in patch if name != self.alternatives_but}
            return lambda name: bool(chosen) and name != self.alternatives_but and name not in chosen
        value = self.alternatives & patch.keys()
        return lambda name: bool(value) and name in self.alternatives and name not in value


DEFAULT_RULES = MergeRules()
_HANDLER = MergeRules(alternatives=frozenset({"exec", "httpGet", "tcpSocket", "grpc", "sleep"}))
_VARIABLE = MergeRules(alternatives=frozenset({"value", "valueFrom"}))
_VOLUME = MergeRules(alternatives_but="name")

CONTAINER = MergeRules(
    lists={
        "env": (_by_field("name"), _VARIABLE),
        "ports": (_by_port, DEFAULT_RULES),
        "volumeMounts": (_by_field("mountPath"), DEFAULT_RULES),
        "volumeDevices": (_by_field("devicePath"), DEFAULT_RULES),
    },
    maps={
        "livenessProbe": _HANDLER,
        "readinessProbe": _HANDLER,
        "startupProbe": _HANDLER,
        "lifecycle": MergeRules(maps={"postStart": _HANDLER, "preStop": _HANDLER}),
    },
)

_POD_LISTS: dict[str, tuple[Key, MergeRules]] = {
    "containers": (_by_field("name"), CONTAINER),
    "initContainers": (_by_field("name"), CONTAINER),
    "ephemeralContainers": (_by_field("name"), CONTAINER),
    "volumes": (_by_field("name"), _VOLUME),
    "imagePullSecrets": (_by_field("name"), DEFAULT_RULES),
    "hostAliases": (_by_field("ip"), DEFAULT_RULES),
    "topologySpreadConstraints": (_by_field("topologyKey"), DEFAULT_RULES),
    "resourceClaims": (_by_field("name"), DEFAULT_RULES),
    "schedulingGates": (_by_field("name"), DEFAULT_RULES),
}

POD = MergeRules(lists=_POD_LISTS)
NODE = MergeRules(lists=_POD_LISTS, maps={"runner": CONTAINER})
"""Rules of a leader or a worker."""
COMPONENT = MergeRules(
    lists=_POD_LISTS,
    maps={"runner": CONTAINER, "leader": NODE, "worker": NODE},
)
"""Rules of an engine, a decoder or a router."""


def is_mapping(value: Any) -> bool:
    """Whether a value merges field by field. The type check is faster than isinstance; documents are dicts."""
    return type(value) is dict or isinstance(value, Mapping)


DIRECTIVE = "$patch"
"""`replace` in a mapping discards the base; `delete` in an item of a keyed list removes the item."""


def merge(base: Document, patch: Document, rules: MergeRules = DEFAULT_RULES) -> dict[str, Any]:
    """Merge a patch into a base. Neither is changed; the result shares parts of both."""
    if patch.get(DIRECTIVE) == "replace":
        return {
            name: _without_directives(value) for name, value in patch.items() if value is not None and name != DIRECTIVE
        }
    if rules.alternatives or rules.alternatives_but:
        excluded = rules.excluded(patch)
        result = {name: value for name, value in base.items() if not excluded(name)}
    else:
        result = dict(base)
    for name, value in patch.items():
        if value is None or name == DIRECTIVE:
            continue
        current = result.get(name)
        if is_mapping(value) and is_mapping(current):
            result[name] = merge(current, value, rules.maps.get(name, DEFAULT_RULES))  # type: ignore[arg-type]
        elif name in rules.lists and isinstance(value, list) and isinstance(current, list):
            result[name] = merge_lists(current, value, *rules.lists[name])
        else:
            result[name] = _without_directives(value)
    return result


def merge_lists(base: Sequence[Any], patch: Sequence[Any], key: Key, rules: MergeRules) -> list[Any]:
    """Merge two keyed lists."""
    places: dict[Hashable, int] = {}
    for index, item in enumerate(base):
        name = _key_of(item, key)
        if name is not None:
            places.setdefault(name, index)
    patched, used, deleted = _merge_items(base, patch, key, rules, places)
    unchanged = [
        (index, item) for index, item in enumerate(base) if index not in used and _key_of(item, key) not in deleted
    ]
    return _interleave(unchanged, patched)


def _merge_items(
    base: Sequence[Any], patch: Sequence[Any], key: Key, rules: MergeRules, places: dict[Hashable, int]
) -> tuple[list[tuple[int | None, Any]], set[int], set[Hashable]]:
    """Merge the patch's items with the base's. Return them with their index in the base, if any."""
    merged: list[tuple[int | None, Any]] = []
    seen: dict[Hashable, int] = {}
    used: set[int] = set()
    deleted: set[Hashable] = set()
    for item in patch:
        name = _key_of(item, key)
        if name is None:
            # An item without a key, which the schema reports. Kept once: a second merge must not duplicate it.
            place = next((number for number, other in enumerate(base) if number not in used and other == item), None)
            if place is not None:
                used.add(place)
            merged.append((place, item))
            continue
        if item.get(DIRECTIVE) == "delete":
            deleted.add(name)
            continue
        if name in seen:
            place, before = merged[seen[name]]
            merged[seen[name]] = (place, merge(before, item, rules))
            continue
        place = places.get(name)
        seen[name] = len(merged)
        if place is None:
            merged.append((None, _without_directives(item)))
        else:
            used.add(place)
            merged.append((place, merge(base[place], item, rules)))
    return merged, used, deleted


def _interleave(unchanged: list[tuple[int, Any]], patched: list[tuple[int | None, Any]]) -> list[Any]:
    """Combine both lists: an item of the base goes before the first item of the patch that followed it in the base."""
    result: list[Any] = []
    rest = iter(unchanged)
    waiting = next(rest, None)
    for index, item in patched:
        while waiting is not None and index is not None and waiting[0] < index:
            result.append(waiting[1])
            waiting = next(rest, None)
        result.append(item)
    while waiting is not None:
        result.append(waiting[1])
        waiting = next(rest, None)
    return result


def _without_directives(value: Any) -> Any:
    """Return a value without its directives."""
    return merge({}, value) if is_mapping(value) and DIRECTIVE in value else value


def _key_of(item: Any, key: Key) -> Hashable:
    return key(item) if is_mapping(item) else None


RUNTIME, SERVICE, ACCELERATOR, DEFAULT = "runtime", "service", "accelerator", "default"


class MergeSources(NamedTuple):
    """A merged pod and its sources."""

    pod: Document
    service: Document
    runtime: Document
    accelerated: tuple[str, ...]
    """Fields, with all below them, that the accelerator class has set."""


class Origins(Mapping[str, str]):
    """Origins by field path (`leader.containers[ome-container].image`), in the order of the pod. Computed on first use."""

    def __init__(self, sources: Callable[[], Mapping[str, MergeSources]]) -> None:
        self._sources = sources

    @cached_property
    def _known(self) -> dict[str, str]:
        return {
            f"{name}.{path}": origin
            for name, item in self._sources().items()
            for path, origin in _origins(item).items()
        }

    def __getitem__(self, path: str) -> str:
        return self._known[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"Origins({self._known})"


def _origins(sources: MergeSources) -> dict[str, str]:
    service, runtime = flatten(sources.service, POD), flatten(sources.runtime, POD)
    origins = {}
    for path, value in flatten(sources.pod, POD).items():
        if any(path == field or path.startswith((f"{field}.", f"{field}[")) for field in sources.accelerated):
            origins[path] = ACCELERATOR
        elif path in service and path in runtime and _is_concatenation(value, runtime[path], service[path]):
            origins[path] = f"{RUNTIME}, {SERVICE}"
        elif path in service:
            origins[path] = SERVICE
        else:
            origins[path] = RUNTIME if path in runtime else DEFAULT
    return origins


def _is_concatenation(value: Any, first: Any, second: Any) -> bool:
    """Whether a list is the concatenation of two: arguments of a container and of its runner."""
    lists = isinstance(first, list) and isinstance(second, list) and bool(first) and bool(second)
    return lists and value == [*first, *second]


def flatten(document: Document, rules: MergeRules = DEFAULT_RULES) -> dict[str, Any]:
    """Return every field of a document by its path. Items of keyed lists have their key in the path."""
    fields: dict[str, Any] = {}
    _flatten(document, rules, "", fields)
    return fields


def _flatten(document: Document, rules: MergeRules, prefix: str, fields: dict[str, Any]) -> None:
    for name, value in document.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            _flatten(value, rules.maps.get(name, DEFAULT_RULES), f"{path}.", fields)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            key, inner = rules.lists.get(name, (lambda _: None, DEFAULT_RULES))
            for number, item in enumerate(value):
                known = key(item)
                _flatten(item, inner, f"{path}[{number if known is None else known}].", fields)
        elif value is not None:
            fields[path] = value
