# SPDX-License-Identifier: Apache-2.0
"""What a pod is, and what it needs of the rest of the fleet. `replica` is written against this; `kubelet` fills it in."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from headrace.fleet.local.machine import Placement
from headrace.fleet.local.system import System
from headrace.fleet.words import Document

if TYPE_CHECKING:
    from headrace.fleet.local.container import Container
    from headrace.fleet.local.replica import Replica


@dataclass(frozen=True)
class Record:
    """What a pod is, as its file has it."""

    uid: str
    document: Document
    """Metadata and spec."""
    service: tuple[str, str]
    """Namespace and name of its InferenceService."""
    owner: tuple[str, str]
    """Kind and name of its workload."""
    unit: str
    """The replica of the workload that it is, or is a part of."""
    hash: str
    """Of the template."""
    serves: bool = True
    index: int = 0
    """In its group."""
    variables: Mapping[str, str] = field(default_factory=dict)
    placement: Placement | None = None
    deleting: str = ""
    """Since when it is being ended."""
    spare: bool = False
    """Enough others serve while it starts for the first time: it takes the place of one of them."""

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Record:
        """Of a file. Raises KeyError, TypeError, ValueError."""
        found = said.get("placement")
        placement = None
        if found:
            ports = {int(inside): int(here) for inside, here in found["ports"].items()}
            placement = Placement(ports, tuple(found["gpus"]), float(found["memory"]))
        pairs = {name: (str(said[name][0]), str(said[name][1])) for name in ("service", "owner")}
        return cls(**{**said, **pairs, "placement": placement})


@dataclass(frozen=True)
class Moments:
    """When a pod's process began, and was found to be ready, since the epoch; 0 where this daemon has not seen it."""

    started: float = 0.0
    found: float = 0.0


class Around(Protocol):
    """What a pod needs of the rest."""

    @property
    def system(self) -> System:
        """Where it runs."""

    def find(self, namespace: str, kind: str, name: str) -> Document | None:
        """A ConfigMap or a Secret."""

    def place(self, replica: Replica) -> Placement:
        """Room for it. Raises ResourceExhausted."""

    def release(self, replica: Replica) -> None:
        """It needs no more room."""

    def models(self, replica: Replica) -> Mapping[str, str]:
        """Paths of its models, and where they are. Raises ResourceExhausted while one is not here."""

    def hosts(self, namespace: str) -> Mapping[str, str]:
        """Where Services are."""

    def leader_ports(self, replica: Replica) -> Mapping[int, int]:
        """Of a worker's leader."""

    def changed(self, replica: Replica) -> None:
        """It is otherwise than before."""

    def ended(self, replica: Replica, container: Container) -> None:
        """A container of it ended: those of its group are to be restarted."""

    def tell(self, replica: Replica, kind: str, reason: str, message: str) -> None:
        """An event."""

    def forgotten(self, replica: Replica) -> Awaitable[None]:
        """Wait until nobody sends requests to it any more."""
