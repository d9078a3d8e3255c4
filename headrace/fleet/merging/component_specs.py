# SPDX-License-Identifier: Apache-2.0
"""The component type, and the two inputs of a merge: a component as its runtime and as its service define it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.fleet.documents import Problem
from headrace.fleet.merging.latency_targets import component_targets
from headrace.fleet.merging.strategic_merge import CONTAINER, merge
from headrace.fleet.names import ENGINE
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_list, get_mapping, get_str


@dataclass(frozen=True)
class Extension:
    """How a component scales, is updated and is reached. None or empty: not set."""

    min_replicas: int = 1
    max_replicas: int = 0
    """0: not more than `min_replicas`."""
    scale_metric: str = ""
    scale_target: int | None = None
    container_concurrency: int | None = None
    timeout_seconds: int | None = None
    canary_traffic_percent: int | None = None
    min_available: int | str | None = None
    max_unavailable: int | str | None = None
    deployment_strategy: Document = field(default_factory=dict)
    keda: Document = field(default_factory=dict)
    """`kedaConfig` of the service, overridden by the component's."""
    autoscaler: Document = field(default_factory=dict)
    """`autoscaler` of the service's component, or else of the runtime's."""
    slo: Document = field(default_factory=dict)
    """Latency targets; empty: none."""


@dataclass(frozen=True)
class Component:
    """A merged component: its deployment mode, pods, scaling and labels."""

    name: str
    """`engine`, `decoder` or `router`."""
    mode: str
    rule: str
    """Why that mode was chosen."""
    pod: Document
    """Pod spec, with the runner among its containers."""
    leader: Document | None = None
    """Pod spec of the first node of a group (MultiNode)."""
    worker: Document | None = None
    """Pod spec of the other nodes."""
    worker_size: int = 0
    """Workers per group, without the leader."""
    extension: Extension = field(default_factory=Extension)
    labels: Mapping[str, str] = field(default_factory=dict)
    """For pods and every object of the component."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """For pods and every object of the component."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Field path (`pod.containers[ome-container].image`) to its origin: runtime, service, accelerator or default."""
    config: Mapping[str, str] = field(default_factory=dict)
    """`router.config`."""
    accelerator: str = ""
    """The chosen AcceleratorClass."""
    accelerator_reason: str = ""
    problems: tuple[Problem, ...] = ()
    """Problems found while merging."""


_SCALING_FIELDS = frozenset(
    {
        "minReplicas",
        "maxReplicas",
        "scaleMetric",
        "scaleTarget",
        "containerConcurrency",
        "timeoutSeconds",
        "canaryTrafficPercent",
        "labels",
        "annotations",
        "minAvailable",
        "maxUnavailable",
        "deploymentStrategy",
        "kedaConfig",
        "autoscaler",
        "slo",
    }
)
_NON_POD_FIELDS = _SCALING_FIELDS | {"runner", "leader", "worker", "size", "acceleratorOverride", "config", "resources"}
"""Fields of a component, a leader or a worker that are not part of its pod spec."""
_LEGACY_POD_FIELDS = (
    "containers",
    "initContainers",
    "volumes",
    "nodeSelector",
    "affinity",
    "tolerations",
    "labels",
    "annotations",
    "imagePullSecrets",
    "schedulerName",
    "hostIPC",
    "dnsPolicy",
    "hostNetwork",
)
"""Pod fields of a runtime without engineConfig, directly below spec."""


def runtime_component(runtime: Document | None, name: str) -> Document:
    """Return the component as the runtime defines it."""
    spec = get_mapping(runtime, "spec")
    config = get_mapping(spec, f"{name}Config")
    if not config and name == ENGINE:
        legacy = {field: spec[field] for field in _LEGACY_POD_FIELDS if spec.get(field) is not None}
        workers = get_mapping(spec, "workers")
        config = {**legacy, "worker": workers} if workers else legacy
    shaped = _normalize(config)
    # A runtime does not choose accelerators.
    return {field: value for field, value in shaped.items() if field != "acceleratorOverride"}


def service_component(service: Document, name: str) -> Document:
    """Return the component as the service defines it."""
    return _normalize(get_mapping(service, "spec", name))


def _normalize(component: Document) -> Document:
    """Move a component's resources to its runner, and make device requests and limits equal.

    The API server accepts devices neither in a pod's own resources nor without an equal limit; users write both.
    """
    normalized = dict(component)
    resources = get_mapping(component, "resources")
    if resources:
        runner = get_mapping(component, "runner")
        normalized["runner"] = {**runner, "resources": merge(resources, get_mapping(runner, "resources"))}
        del normalized["resources"]
    for path in ("runner", "leader", "worker"):
        inner = normalized.get(path)
        if not isinstance(inner, Mapping):
            continue
        if path == "runner":
            normalized[path] = _balance_devices(inner)
        else:
            normalized[path] = _normalize(inner)
    if get_list(component, "containers"):
        normalized["containers"] = [
            _balance_devices(container) if isinstance(container, Mapping) else container
            for container in component["containers"]
        ]
    return normalized


def _balance_devices(container: Document) -> Document:
    resources = container.get("resources")
    if not isinstance(resources, Mapping):
        return container
    requests, limits = get_mapping(resources, "requests"), get_mapping(resources, "limits")
    devices = {name for name in (*requests, *limits) if isinstance(name, str) and "/" in name}
    incomplete = [name for name in devices if (name in requests) != (name in limits)]
    if not incomplete:
        return container
    return {
        **container,
        "resources": {
            **resources,
            "requests": {**requests, **{name: limits[name] for name in sorted(incomplete) if name in limits}},
            "limits": {**limits, **{name: requests[name] for name in sorted(incomplete) if name in requests}},
        },
    }


def pod_spec_of(component: Document, path: tuple[str, ...], main: str) -> dict[str, Any]:
    """Return the pod spec at a path of a component, with its runner among the containers."""
    role_spec = get_mapping(component, *path)
    pod = {field: value for field, value in role_spec.items() if field not in _NON_POD_FIELDS and value is not None}
    runner = get_mapping(role_spec, "runner")
    if runner:
        pod["containers"] = _with_runner(get_list(role_spec, "containers"), runner, main)
    return pod


def _with_runner(containers: list[Any], runner: Document, main: str) -> list[Any]:
    """Merge the runner into the container of its name, or append it. Arguments are concatenated."""
    for index, container in enumerate(containers):
        if get_str(container, "name") == main:
            merged = merge(container, runner, CONTAINER)
            args = [*get_list(container, "args"), *get_list(runner, "args")]
            if args:
                merged["args"] = args
            return [*containers[:index], merged, *containers[index + 1 :]]
    return [*containers, {"name": main, **{field: value for field, value in runner.items() if value is not None}}]


def read_extension(base: Document, merged: Document, service: Document, name: str) -> Extension:
    """Read how a merged component scales. The component's KEDA settings override the service's and the runtime's."""
    own = get_mapping(service, "spec", name, "kedaConfig")
    keda = merge(merge(get_mapping(base, "kedaConfig"), get_mapping(service, "spec", "kedaConfig")), own)
    min_replicas, max_replicas = get_int(merged, "minReplicas"), get_int(merged, "maxReplicas")
    return Extension(
        min_replicas=1 if min_replicas is None else max(0, min_replicas),
        max_replicas=max_replicas or 0,
        scale_metric=get_str(merged, "scaleMetric"),
        scale_target=get_int(merged, "scaleTarget"),
        container_concurrency=get_int(merged, "containerConcurrency"),
        timeout_seconds=get_int(merged, "timeoutSeconds"),
        canary_traffic_percent=get_int(merged, "canaryTrafficPercent"),
        min_available=_int_or_str(merged.get("minAvailable")),
        max_unavailable=_int_or_str(merged.get("maxUnavailable")),
        deployment_strategy=_strategy(
            get_mapping(base, "deploymentStrategy"), get_mapping(service, "spec", name, "deploymentStrategy")
        ),
        keda=keda,
        autoscaler=get_mapping(service, "spec", name, "autoscaler") or get_mapping(base, "autoscaler"),
        slo=component_targets(service, base, name),
    )


def _int_or_str(value: Any) -> int | str | None:
    return value if isinstance(value, int | str) and not isinstance(value, bool) else None


def _strategy(base: Document, patch: Document) -> Document:
    merged = merge(base, patch)
    if get_str(merged, "type") == "Recreate":
        # The runtime's settings of rolling updates do not apply.
        merged.pop("rollingUpdate", None)
    return merged
