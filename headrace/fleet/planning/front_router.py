# SPDX-License-Identifier: Apache-2.0
"""The front router of a service: splits requests between revisions, holds them while pods start from zero, or both.

It is used where neither Knative nor a Gateway does so. Its configuration is a file for `headrace router --config`, from a
ConfigMap that the router also watches: other shares, timeouts and targets need no restart. In it,
`activation.targets` are workloads that the router scales from 0 to 1 through their `scale` subresource when a request comes,
and back to 0 after `idle_seconds` without any; a target with `scale` is also kept at `metric` per replica (concurrency or
rps), up to `most`. Requests wait for all targets at most `wait_seconds`; at most `held_requests` wait, with `held_bytes`.
While it is not idle, `/router/status` has `"active": 1`, for KEDA.

Where the cluster has a shared activator, a service that is scaled to zero has no front router: see `shared_activator`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from headrace.fleet.merging import Component
from headrace.fleet.names import APP_LABEL, trunc63
from headrace.fleet.planning.autoscalers import REQUEST_TARGETS, request_metric
from headrace.fleet.planning.context import Object, PlanContext, available_replicas, digest_of
from headrace.fleet.planning.pod_defaults import SLOWEST_REQUEST_SECONDS, with_graceful_stop, with_last_log_lines
from headrace.fleet.planning.raw_deployment import DEPLOYMENT
from headrace.fleet.planning.router_component import SERVICE_ACCOUNT, backend_argument, role_objects
from headrace.fleet.planning.shared_activator import (
    ACTIVATION,
    SharedActivator,
    activation_annotation,
    is_scaled_to_zero,
)
from headrace.platforms.kubernetes_client.objects import Document, get_str

FRONT = "front"
PORT = 8080
CONFIG_MAP = ("v1", "ConfigMap")
IDLE_SECONDS = "ome.io/scale-to-zero-idle-seconds"
"""Annotation: seconds without requests after which a service scales to zero."""
SLEEP_LEVEL = "ome.io/scale-to-zero-sleep-level"
"""Annotation: in the local fleet, put the models of an idle service to sleep at this level (1 or 2) in a warm process."""
DEFAULT_IDLE = 300
WAIT_SECONDS = 900
HELD_REQUESTS = 1000
HELD_BYTES = 256 << 20
CONFIG_FILE = "router.yaml"
"""Key of the ConfigMap."""
_FOLDER = "/etc/headrace"
RESTART_DIGEST = "ome.io/config-digest"
"""Annotation of the pods: a digest of the settings that need a restart."""
_RELOADED = ("backends", "timeouts", "activation", "measure_streams")
"""Sections that a running router reloads."""


@dataclass(frozen=True)
class Backend:
    """A Service that gets a share of the requests."""

    service: str
    port: int
    weight: int = 100
    revision: str = ""
    """The revision that the router counts its requests under."""


@dataclass(frozen=True)
class ActivationTarget:
    """A workload that scales to zero."""

    component: Component
    kind: tuple[str, str]
    name: str
    scaled_here: bool
    """Whether the front router also scales it above one replica."""


def front_name(context: PlanContext) -> str:
    """Return `llama-chat-front`."""
    return f"{context.name}-{FRONT}"


def front_selector(context: PlanContext) -> dict[str, str]:
    """Return the selector of the front router's pods."""
    return {APP_LABEL: trunc63(front_name(context))}


def front_workload(context: PlanContext) -> Document | None:
    """Return the live Deployment of the front router, if there is one."""
    return context.live_object("Deployment", front_name(context))


def front_is_ready(context: PlanContext) -> bool:
    """Whether the front router has an available replica."""
    return available_replicas(front_workload(context)) > 0


def config_version(config_map: Document | None) -> str:
    """Return the version of the configuration in a front router's ConfigMap; its status has the one that it runs with."""
    try:
        config = json.loads(get_str(config_map, "data", CONFIG_FILE) or "{}")
    except ValueError:
        return ""
    return get_str(config, "config_version")


def front_objects(
    context: PlanContext,
    backends: list[Backend],
    activation_targets: list[ActivationTarget],
    timeout: int | None,
    keep_host: bool,
    activator: SharedActivator | None = None,
    *,
    measure_streams: bool = False,
) -> list[Object]:
    """Return the front router's Deployment, configuration, and the Role to scale its targets.

    activator: the shared activator, if it takes over while the service is scaled to zero. measure_streams: count the latency
    of streams, for autoscalers.
    """
    name, labels = front_name(context), context.own_labels(FRONT)
    seconds = timeout or SLOWEST_REQUEST_SECONDS
    settings = _config(context, backends, activation_targets, timeout, keep_host)
    if measure_streams:
        settings["measure_streams"] = True
    annotations: dict[str, str] = {}
    if activator is not None:
        settings["activation"]["shared"] = True
        annotations[ACTIVATION] = activation_annotation(
            activator.port, _activation_summary(backends, activation_targets, timeout)
        )
    fixed = {key: value for key, value in settings.items() if key not in _RELOADED}
    settings["config_version"] = digest_of(json.dumps(settings))
    # JSON is YAML, and is written ten times as fast.
    config = json.dumps(settings, indent=1) + "\n"
    objects = [context.new_object(CONFIG_MAP, name, labels, data={CONFIG_FILE: config})]
    objects.append(context.new_object(SERVICE_ACCOUNT, name, labels))
    accounts = [(context.namespace, name)]
    if activator is not None:
        accounts.append((activator.namespace, activator.account))
    rules = [_config_rule(name), *_scale_rules(activation_targets)]
    objects += role_objects(context, name, accounts, labels, rules)
    pod = router_pod(context, name, PORT, "http", watch=True)
    pod_labels = {**labels, **front_selector(context)}
    spec: Object = {
        # One replica with activation: two would have to coordinate before scaling to zero.
        "replicas": _replicas(context, activation_targets, activator),
        "selector": {"matchLabels": front_selector(context)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {
            "metadata": {"labels": pod_labels, "annotations": {RESTART_DIGEST: digest_of(json.dumps(fixed))}},
            "spec": with_last_log_lines(with_graceful_stop(context, pod, seconds)),
        },
    }
    return [*objects, context.new_object(DEPLOYMENT, name, labels, annotations, spec=spec)]


def _replicas(
    context: PlanContext, activation_targets: list[ActivationTarget], activator: SharedActivator | None
) -> int:
    if not activation_targets:
        return 2
    workloads = workloads_of(activation_targets)
    if activator is not None and is_scaled_to_zero(context, workloads) and activator.has_taken_over(context):
        return 0
    return 1


def workloads_of(activation_targets: list[ActivationTarget]) -> list[tuple[str, str]]:
    """Return the kinds and names of the workloads that scale to zero."""
    return [(target.kind[1], target.name) for target in activation_targets]


def keda_trigger(context: PlanContext, port: int) -> dict[str, str]:
    """Return KEDA's metrics-api trigger: whether the front router is active. `port`: that of the service's Service."""
    url = f"http://{context.host(trunc63(context.name))}:{port}/router/status"
    return {"url": url, "valueLocation": "active", "targetValue": "1", "activationTargetValue": "0"}


def _config(
    context: PlanContext,
    backends: list[Backend],
    activation_targets: list[ActivationTarget],
    timeout: int | None,
    keep_host: bool,
) -> Object:
    settings: Object = {
        "host": "0.0.0.0",  # noqa: S104  in its pod
        "port": PORT,
        "policy": "weighted",
        "keep_host": keep_host,
        "grace_seconds": timeout or SLOWEST_REQUEST_SECONDS,
        # No health checks: a Service only routes to ready pods.
        "health": {"path": ""},
        "backends": [
            backend_argument(f"http://{context.host(backend.service)}:{backend.port}", backend.weight, backend.revision)
            for backend in backends
            if backend.weight > 0
        ],
    }
    if timeout is not None:
        settings["timeouts"] = {"response_seconds": timeout, "idle_seconds": timeout}
    if activation_targets:
        settings["activation"] = _activation(context, activation_targets)
    return settings


def _activation_summary(
    backends: list[Backend], activation_targets: list[ActivationTarget], timeout: int | None
) -> Object:
    """Return the activation settings for the shared activator. Names only: all objects are in the service's namespace."""
    return {
        "backends": [
            {"service": backend.service, "port": backend.port, "weight": backend.weight}
            for backend in backends
            if backend.weight > 0
        ],
        "targets": [
            {"apiVersion": target.kind[0], "kind": target.kind[1], "name": target.name} for target in activation_targets
        ],
        "timeoutSeconds": timeout or SLOWEST_REQUEST_SECONDS,
        "waitSeconds": WAIT_SECONDS,
        "heldRequests": HELD_REQUESTS,
        "heldBytes": HELD_BYTES,
    }


def _activation(context: PlanContext, activation_targets: list[ActivationTarget]) -> Object:
    value, level = context.annotations.get(IDLE_SECONDS, ""), context.annotations.get(SLEEP_LEVEL, "")
    return {
        **({"sleep_level": int(level)} if level in ("1", "2") else {}),
        "idle_seconds": int(value) if value.isdecimal() and value.isascii() and len(value) < 8 else DEFAULT_IDLE,
        "wait_seconds": WAIT_SECONDS,
        "held_requests": HELD_REQUESTS,
        "held_bytes": HELD_BYTES,
        "targets": [_activation_target(context, target) for target in activation_targets],
    }


def _activation_target(context: PlanContext, target: ActivationTarget) -> Object:
    entry: Object = {
        "apiVersion": target.kind[0],
        "kind": target.kind[1],
        "namespace": context.namespace,
        "name": target.name,
    }
    metric, extension = request_metric(target.component), target.component.extension
    if target.scaled_here and metric:
        entry["scale"] = {
            "metric": metric,
            "target": extension.scale_target or REQUEST_TARGETS[metric],
            "most": max(1, extension.max_replicas),
        }
    return entry


def _scale_rules(activation_targets: list[ActivationTarget]) -> list[Object]:
    groups: dict[tuple[str, str], list[str]] = {}
    for target in activation_targets:
        groups.setdefault((target.kind[0].partition("/")[0], f"{target.kind[1].lower()}s"), []).append(target.name)
    rules: list[Object] = []
    for (group, resource), names in groups.items():
        rules += [
            {"apiGroups": [group], "resources": [resource], "resourceNames": names, "verbs": ["get", "list", "watch"]},
            {
                "apiGroups": [group],
                "resources": [f"{resource}/scale"],
                "resourceNames": names,
                "verbs": ["get", "patch"],
            },
        ]
    return rules


def _config_rule(name: str) -> Object:
    return {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "resourceNames": [name],
        "verbs": ["get", "list", "watch"],
    }


def router_pod(context: PlanContext, name: str, port: int, port_name: str, *, watch: bool) -> Object:
    """Return the pod of a router with the ConfigMap and the ServiceAccount of this name. `watch`: follow the ConfigMap."""
    container = {
        "name": "router",
        "image": context.facts.settings.image,
        "args": [
            "router",
            "--config",
            f"{_FOLDER}/{CONFIG_FILE}",
            *(["--config-map", f"{context.namespace}/{name}"] if watch else []),
        ],
        "ports": [{"name": port_name, "containerPort": port, "protocol": "TCP"}],
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 2},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "config", "mountPath": _FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  its own volume
        ],
    }
    return {
        "serviceAccountName": name,
        "automountServiceAccountToken": True,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": name}}, {"name": "tmp", "emptyDir": {}}],
    }
