# SPDX-License-Identifier: Apache-2.0
"""The front: our router before a service, to split requests between revisions, to hold them while pods wake, or both.

It stands where neither Knative nor a Gateway does that. Its file is what `headrace router --config` reads. `activation` in
it says which workloads sleep: `targets` are scaled from 0 to 1 by their `scale` subresource when a request comes, and back
to 0 after `idle_seconds` without any; one with `scale` is also kept at `metric` per replica (concurrency or rps), up to
`most`. Requests wait for all targets at most `wait_seconds`, and at most `held_requests` of them with `held_bytes`. As long
as it is not idle, `/router/status` has `"active": 1`, for KEDA.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from headrace.fleet.merging import Component
from headrace.fleet.names import APP_LABEL, trunc63
from headrace.fleet.planning.raw import DEPLOYMENT
from headrace.fleet.planning.routers import ACCOUNT, address, role_objects
from headrace.fleet.planning.scaling import REQUEST_TARGETS, request_metric
from headrace.fleet.planning.site import Object, Site, available, digest_of

FRONT = "front"
PORT = 8080
CONFIG_MAP = ("v1", "ConfigMap")
IDLE_SECONDS = "ome.io/scale-to-zero-idle-seconds"
"""Annotation: how long nothing may come before a service sleeps."""
DEFAULT_IDLE = 300
WAIT_SECONDS = 900
HELD_REQUESTS = 1000
HELD_BYTES = 256 << 20
_FILE = "router.yaml"
_FOLDER = "/etc/headrace"
_CONFIG_DIGEST = "ome.io/config-digest"


@dataclass(frozen=True)
class Backend:
    """A Service that gets a share of the requests."""

    service: str
    port: int
    weight: int = 100
    revision: str = ""
    """What the router counts it by."""


@dataclass(frozen=True)
class Sleeper:
    """A workload that goes down to zero."""

    component: Component
    kind: tuple[str, str]
    name: str
    scaled_here: bool
    """Whether the front also says how many there are above one."""


def front_name(site: Site) -> str:
    """`llama-chat-front`."""
    return f"{site.name}-{FRONT}"


def front_selector(site: Site) -> dict[str, str]:
    """The pods of the front."""
    return {APP_LABEL: trunc63(front_name(site))}


def front_answers(site: Site) -> bool:
    """Whether the front is up, as far as is known."""
    return available(site.found("Deployment", front_name(site))) > 0


def front_objects(
    site: Site, backends: list[Backend], sleepers: list[Sleeper], timeout: int | None, keep_host: bool
) -> list[Object]:
    """The front's Deployment, its file, and what lets it scale the sleepers."""
    name, labels = front_name(site), site.own_labels(FRONT)
    config = _config(site, backends, sleepers, timeout, keep_host)
    objects = [site.made(CONFIG_MAP, name, labels, data={_FILE: config})]
    if sleepers:
        objects.append(site.made(ACCOUNT, name, labels))
        objects += role_objects(site, name, name, labels, _rules(sleepers))
    pod_labels = {**labels, **front_selector(site)}
    spec: Object = {
        # Two that hold requests would each have to know of the other's before they let the pods sleep.
        "replicas": 1 if sleepers else 2,
        "selector": {"matchLabels": front_selector(site)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {
            "metadata": {"labels": pod_labels, "annotations": {_CONFIG_DIGEST: digest_of(config)}},
            "spec": _pod(site, name, bool(sleepers)),
        },
    }
    return [*objects, site.made(DEPLOYMENT, name, labels, spec=spec)]


def counted_by(site: Site, port: int) -> dict[str, str]:
    """KEDA's metrics-api trigger: the front tells whether anything has come of late. `port`: of the service's Service."""
    url = f"http://{site.host(trunc63(site.name))}:{port}/router/status"
    return {"url": url, "valueLocation": "active", "targetValue": "1", "activationTargetValue": "0"}


def _config(site: Site, backends: list[Backend], sleepers: list[Sleeper], timeout: int | None, keep_host: bool) -> str:
    settings: Object = {
        "host": "0.0.0.0",  # noqa: S104  in its pod
        "port": PORT,
        "policy": "weighted",
        "keep_host": keep_host,
        # A Service answers for pods that the cluster has checked already.
        "health": {"path": ""},
        "backends": [
            address(f"http://{site.host(each.service)}:{each.port}", each.weight, each.revision)
            for each in backends
            if each.weight > 0
        ],
    }
    if timeout is not None:
        settings["timeouts"] = {"response_seconds": timeout, "idle_seconds": timeout}
    if sleepers:
        settings["activation"] = _activation(site, sleepers)
    # JSON is YAML, and is written ten times as fast.
    return json.dumps(settings, indent=1) + "\n"


def _activation(site: Site, sleepers: list[Sleeper]) -> Object:
    said = site.annotations.get(IDLE_SECONDS, "")
    return {
        "idle_seconds": int(said) if said.isdecimal() and said.isascii() and len(said) < 8 else DEFAULT_IDLE,
        "wait_seconds": WAIT_SECONDS,
        "held_requests": HELD_REQUESTS,
        "held_bytes": HELD_BYTES,
        "targets": [_target(site, each) for each in sleepers],
    }


def _target(site: Site, sleeper: Sleeper) -> Object:
    target: Object = {
        "apiVersion": sleeper.kind[0],
        "kind": sleeper.kind[1],
        "namespace": site.namespace,
        "name": sleeper.name,
    }
    metric, extension = request_metric(sleeper.component), sleeper.component.extension
    if sleeper.scaled_here and metric:
        target["scale"] = {
            "metric": metric,
            "target": extension.scale_target or REQUEST_TARGETS[metric],
            "most": max(1, extension.max_replicas),
        }
    return target


def _rules(sleepers: list[Sleeper]) -> list[Object]:
    groups: dict[tuple[str, str], list[str]] = {}
    for each in sleepers:
        groups.setdefault((each.kind[0].partition("/")[0], f"{each.kind[1].lower()}s"), []).append(each.name)
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


def _pod(site: Site, name: str, speaks: bool) -> Object:
    container = {
        "name": "router",
        "image": site.facts.settings.image,
        "args": ["router", "--config", f"{_FOLDER}/{_FILE}"],
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 2},
        # Time for the cluster to send nobody here any more.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "config", "mountPath": _FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  a volume of its own
        ],
    }
    pod: Object = {
        "automountServiceAccountToken": speaks,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": name}}, {"name": "tmp", "emptyDir": {}}],
    }
    return {**pod, "serviceAccountName": name} if speaks else pod
