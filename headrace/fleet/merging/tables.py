# SPDX-License-Identifier: Apache-2.0
"""How the fields of pods merge: which lists are keyed and by what, and which fields exclude each other.

Used by `strategic` and `origins`. A list that is not here is replaced as a whole: command, args, tolerations. The keys are
those of Kubernetes' own strategic merge; the alternatives are ours, as there a volume or a probe ends up with two sources.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.fleet.words import Document

Key = Callable[[Document], Hashable]


def _by(name: str) -> Key:
    def key(item: Document) -> Hashable:
        value = item.get(name)
        return value if isinstance(value, str | int) else None

    return key


def _port(item: Document) -> Hashable:
    """A port and its protocol: DNS listens on 53 twice."""
    number, protocol = item.get("containerPort"), item.get("protocol") or "TCP"
    if not isinstance(number, int):
        return None
    return number if protocol == "TCP" else f"{number}/{protocol}"


@dataclass(frozen=True)
class Table:
    """The rules for the fields of one mapping."""

    lists: Mapping[str, tuple[Key, Table]] = field(default_factory=dict)
    maps: Mapping[str, Table] = field(default_factory=dict)
    alternatives: frozenset[str] = frozenset()
    """Fields of which there may be one."""
    alternatives_but: str = ""
    """Or: all fields but this one are alternatives."""

    def excluded(self, patch: Document) -> Callable[[str], bool]:
        """Which fields of the base go because the patch has an alternative."""
        if self.alternatives_but:
            chosen = {name for name in patch if name != self.alternatives_but}
            return lambda name: bool(chosen) and name != self.alternatives_but and name not in chosen
        said = self.alternatives & patch.keys()
        return lambda name: bool(said) and name in self.alternatives and name not in said


PLAIN = Table()
_HANDLER = Table(alternatives=frozenset({"exec", "httpGet", "tcpSocket", "grpc", "sleep"}))
_VARIABLE = Table(alternatives=frozenset({"value", "valueFrom"}))
_VOLUME = Table(alternatives_but="name")

CONTAINER = Table(
    lists={
        "env": (_by("name"), _VARIABLE),
        "ports": (_port, PLAIN),
        "volumeMounts": (_by("mountPath"), PLAIN),
        "volumeDevices": (_by("devicePath"), PLAIN),
    },
    maps={
        "livenessProbe": _HANDLER,
        "readinessProbe": _HANDLER,
        "startupProbe": _HANDLER,
        "lifecycle": Table(maps={"postStart": _HANDLER, "preStop": _HANDLER}),
    },
)

_POD_LISTS: dict[str, tuple[Key, Table]] = {
    "containers": (_by("name"), CONTAINER),
    "initContainers": (_by("name"), CONTAINER),
    "ephemeralContainers": (_by("name"), CONTAINER),
    "volumes": (_by("name"), _VOLUME),
    "imagePullSecrets": (_by("name"), PLAIN),
    "hostAliases": (_by("ip"), PLAIN),
    "topologySpreadConstraints": (_by("topologyKey"), PLAIN),
    "resourceClaims": (_by("name"), PLAIN),
    "schedulingGates": (_by("name"), PLAIN),
}

POD = Table(lists=_POD_LISTS)
NODE = Table(lists=_POD_LISTS, maps={"runner": CONTAINER})
"""A leader or a worker."""
COMPONENT = Table(
    lists=_POD_LISTS,
    maps={"runner": CONTAINER, "leader": NODE, "worker": NODE},
)
"""An engine, a decoder or a router."""


def is_mapping(value: Any) -> bool:
    """Whether a value merges field by field. Quicker than asking for a Mapping; documents are dicts."""
    return type(value) is dict or isinstance(value, Mapping)
