# SPDX-License-Identifier: Apache-2.0
"""The two sides of a merge: a component as its runtime has it, and as its service has it, brought into one shape.

Called by `components`. Also takes a merged component apart again: pods here, scaling there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.fleet.merging.parts import Extension
from headrace.fleet.merging.strategic import merged
from headrace.fleet.merging.tables import CONTAINER
from headrace.fleet.names import ENGINE
from headrace.fleet.words import Document, items, part, text, whole

_SCALING = frozenset(
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
    }
)
_NOT_POD = _SCALING | {"runner", "leader", "worker", "size", "acceleratorOverride", "config", "resources"}
"""Fields of a component, a leader or a worker that are not its pod's."""
_LEGACY = (
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
"""What a runtime without engineConfig says of its pods, right under spec."""


def base_of(runtime: Document | None, name: str) -> Document:
    """What a runtime has for a component."""
    spec = part(runtime, "spec")
    config = part(spec, f"{name}Config")
    if not config and name == ENGINE:
        made = {field: spec[field] for field in _LEGACY if spec.get(field) is not None}
        workers = part(spec, "workers")
        config = {**made, "worker": workers} if workers else made
    shaped = _shaped(config)
    # A runtime does not choose accelerators for its services.
    return {field: value for field, value in shaped.items() if field != "acceleratorOverride"}


def patch_of(service: Document, name: str) -> Document:
    """What a service says of a component."""
    return _shaped(part(service, "spec", name))


def _shaped(component: Document) -> Document:
    """A component with its resources in its runner, and as many accelerators requested as allowed.

    The API server takes no accelerators in a pod's own resources, and none without an equal limit; people write both.
    """
    made = dict(component)
    resources = part(component, "resources")
    if resources:
        runner = part(component, "runner")
        made["runner"] = {**runner, "resources": merged(resources, part(runner, "resources"))}
        del made["resources"]
    for path in ("runner", "leader", "worker"):
        inner = made.get(path)
        if not isinstance(inner, Mapping):
            continue
        if path == "runner":
            made[path] = _evened(inner)
        else:
            made[path] = _shaped(inner)
    if items(component, "containers"):
        made["containers"] = [_evened(each) if isinstance(each, Mapping) else each for each in component["containers"]]
    return made


def _evened(container: Document) -> Document:
    resources = container.get("resources")
    if not isinstance(resources, Mapping):
        return container
    requests, limits = part(resources, "requests"), part(resources, "limits")
    devices = {name for name in (*requests, *limits) if isinstance(name, str) and "/" in name}
    lacking = [name for name in devices if (name in requests) != (name in limits)]
    if not lacking:
        return container
    return {
        **container,
        "resources": {
            **resources,
            "requests": {**requests, **{name: limits[name] for name in sorted(lacking) if name in limits}},
            "limits": {**limits, **{name: requests[name] for name in sorted(lacking) if name in requests}},
        },
    }


def pod_of(component: Document, path: tuple[str, ...], main: str) -> dict[str, Any]:
    """The pod spec described at a path of a component, its runner put among the containers."""
    described = part(component, *path)
    pod = {field: value for field, value in described.items() if field not in _NOT_POD and value is not None}
    runner = part(described, "runner")
    if runner:
        pod["containers"] = _with_runner(items(described, "containers"), runner, main)
    return pod


def _with_runner(containers: list[Any], runner: Document, main: str) -> list[Any]:
    """The runner laid over the container of its name, or put behind the others. Arguments are joined."""
    for place, each in enumerate(containers):
        if text(each, "name") == main:
            both = merged(each, runner, CONTAINER)
            args = [*items(each, "args"), *items(runner, "args")]
            if args:
                both["args"] = args
            return [*containers[:place], both, *containers[place + 1 :]]
    return [*containers, {"name": main, **{field: value for field, value in runner.items() if value is not None}}]


def extension_of(base: Document, both: Document, service: Document, name: str) -> Extension:
    """How a merged component scales. KEDA: the runtime's, under the service's, under the component's own."""
    own = part(service, "spec", name, "kedaConfig")
    keda = merged(merged(part(base, "kedaConfig"), part(service, "spec", "kedaConfig")), own)
    least, most = whole(both, "minReplicas"), whole(both, "maxReplicas")
    return Extension(
        min_replicas=1 if least is None else max(0, least),
        max_replicas=most or 0,
        scale_metric=text(both, "scaleMetric"),
        scale_target=whole(both, "scaleTarget"),
        container_concurrency=whole(both, "containerConcurrency"),
        timeout_seconds=whole(both, "timeoutSeconds"),
        canary_traffic_percent=whole(both, "canaryTrafficPercent"),
        min_available=_share(both.get("minAvailable")),
        max_unavailable=_share(both.get("maxUnavailable")),
        deployment_strategy=_strategy(
            part(base, "deploymentStrategy"), part(service, "spec", name, "deploymentStrategy")
        ),
        keda=keda,
    )


def _share(value: Any) -> int | str | None:
    return value if isinstance(value, int | str) and not isinstance(value, bool) else None


def _strategy(base: Document, patch: Document) -> Document:
    both = merged(base, patch)
    if text(both, "type") == "Recreate":
        # What a runtime says of rolling updates has no place beside it.
        both.pop("rollingUpdate", None)
    return both
