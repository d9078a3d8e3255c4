# SPDX-License-Identifier: Apache-2.0
"""What sleeps and how it is woken: the section `activation` of a router's file. Read by `cli.router_activation`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from headrace.fleet.autoscaling.deciding import Aim
from headrace.fleet.autoscaling.meter import CONCURRENCY, RPS

METRICS = (CONCURRENCY, RPS)


@dataclass(frozen=True, slots=True)
class TargetScale:
    """How many there should be above one."""

    metric: str
    """What is counted: requests at once, or requests per second."""
    target: float
    """How much of it one replica is to have."""
    most: int
    """Replicas there may be."""

    @property
    def aim(self) -> Aim:
        """For `decide`."""
        return Aim(self.target, self.most)


@dataclass(frozen=True, slots=True)
class Target:
    """Something that sleeps: on Kubernetes a workload with a `scale` subresource."""

    name: str
    namespace: str = "default"
    kind: str = "Deployment"
    api_version: str = "apps/v1"
    scale: TargetScale | None = None
    """None: somebody else says how many there are above one."""

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """What sleeps is of the fleet of this machine."""

    folder: str
    """Of `headrace up`."""
    service: str
    """The InferenceService that the targets are of."""


def never_idle(settings: ActivationSettings) -> ActivationSettings:
    """For what shall not sleep any more, and may have somebody waiting for it: nobody is put to sleep, nor scaled."""
    targets = tuple(replace(each, scale=None) for each in settings.targets)
    return replace(settings, targets=targets, idle_seconds=inf)


@dataclass(frozen=True, slots=True)
class ActivationSettings:
    """See the module."""

    targets: tuple[Target, ...]
    """A request waits for all of them."""
    idle_seconds: float = 300.0
    """Without any request for so long, they sleep."""
    wait_seconds: float = 900.0
    """The longest a request waits."""
    held_requests: int = 1000
    """Requests that may wait."""
    held_bytes: int = 256 << 20
    """The bytes of their bodies that are kept."""
    local: LocalPlace | None = None
    """None: the targets are a cluster's."""
