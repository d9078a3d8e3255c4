# SPDX-License-Identifier: Apache-2.0
"""A component of a service as merging hands it to planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.fleet.words import Document, Problem


@dataclass(frozen=True)
class Extension:
    """How a component scales, is replaced and is reached. None or empty: nobody said."""

    min_replicas: int = 1
    max_replicas: int = 0
    """0: no more than the least."""
    scale_metric: str = ""
    scale_target: int | None = None
    container_concurrency: int | None = None
    timeout_seconds: int | None = None
    canary_traffic_percent: int | None = None
    min_available: int | str | None = None
    max_unavailable: int | str | None = None
    deployment_strategy: Document = field(default_factory=dict)
    keda: Document = field(default_factory=dict)
    """`kedaConfig` of the service, with the component's laid over it."""


@dataclass(frozen=True)
class Component:
    """One component: its mode and the rule that chose it, its pods, its scaling, its labels."""

    name: str
    """`engine`, `decoder` or `router`."""
    mode: str
    rule: str
    """Why that mode, in words."""
    pod: Document
    """Pod spec, the runner among its containers."""
    leader: Document | None = None
    """Pod spec of the first node of a group (MultiNode)."""
    worker: Document | None = None
    """Pod spec of the other nodes."""
    worker_size: int = 0
    """Workers per group, the leader not counted."""
    extension: Extension = field(default_factory=Extension)
    labels: Mapping[str, str] = field(default_factory=dict)
    """For pods and every object of the component."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """For pods and every object of the component."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Field path (`pod.containers[ome-container].image`) to who said it: runtime, service, accelerator or default."""
    config: Mapping[str, str] = field(default_factory=dict)
    """`router.config`."""
    accelerator: str = ""
    """The AcceleratorClass that was chosen."""
    accelerator_reason: str = ""
    problems: tuple[Problem, ...] = ()
    """What cannot be made as written."""
