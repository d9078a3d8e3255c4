# SPDX-License-Identifier: Apache-2.0
"""The operator's own objects: kinds, namespace, account, rights, Deployment. For `headrace operator manifests`. Pure.

The rights follow from the table of kinds that the controller writes, so that neither can fall behind the other. It holds no
right to Secrets, and none to give away rights: it may make the Roles of routers because it has all that is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.fleet.cluster.program import NAMESPACE
from headrace.fleet.cluster.resources import CHILDREN, FACTS, LEASES, PODS, SERVICES
from headrace.fleet.names import GROUP
from headrace.fleet.schema.crds import crds
from headrace.fleet.words import Document, FleetSettings

NAME = "headrace-operator"
PORT = 8080
_COMMAND = ("operator", "run", "--listen", f"0.0.0.0:{PORT}")
_RBAC = "rbac.authorization.k8s.io"
_SCRAPED = {"prometheus.io/scrape": "true", "prometheus.io/port": str(PORT), "prometheus.io/path": "/metrics"}
_READ = ["get", "list", "watch"]
_WRITE = [*_READ, "create", "patch", "delete"]
_SCALED = ("apps/deployments", "leaderworkerset.x-k8s.io/leaderworkersets")
"""What our router wakes: it is given the right to, so the operator must have it."""


@dataclass(frozen=True)
class ManifestSettings:
    """How the operator is to be run."""

    namespace: str = NAMESPACE
    image: str = FleetSettings.image
    replicas: int = 1
    arguments: tuple[str, ...] = ()
    """More words for `headrace operator run`."""


def manifests(settings: ManifestSettings) -> list[Document]:
    """All objects, in the order to make them."""
    return [
        *crds().values(),
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": settings.namespace, "labels": _labels()}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(settings)},
        _role("ClusterRole", {"name": NAME, "labels": _labels()}, cluster_rules()),
        _binding("ClusterRole", {"name": NAME, "labels": _labels()}, settings),
        _role("Role", _metadata(settings), [_rule("coordination.k8s.io", [LEASES.resource.plural], _LEASE)]),
        _binding("Role", _metadata(settings), settings),
        _deployment(settings),
    ]


_LEASE = ["get", "create", "update"]


def cluster_rules() -> list[dict[str, Any]]:
    """What the operator may do in all namespaces."""
    rules = [
        _rule(GROUP, [SERVICES.plural], [*_READ, "patch"]),
        _rule(GROUP, [f"{SERVICES.plural}/status"], ["patch"]),
        # Asked for by clusters that check who may keep an owner from being deleted.
        _rule(GROUP, [f"{SERVICES.plural}/finalizers"], ["update"]),
        _rule(GROUP, [each.plural for each in FACTS], _READ),
        _rule("", [PODS.plural], _READ),
        _rule("", ["events"], ["create"]),
    ]
    groups: dict[str, list[str]] = {}
    for each in CHILDREN:
        groups.setdefault(each.group, []).append(each.plural)
    rules += [_rule(group, plurals, _WRITE) for group, plurals in groups.items()]
    for scaled in _SCALED:
        group, _, plural = scaled.partition("/")
        rules.append(_rule(group, [f"{plural}/scale"], ["get", "patch"]))
    return rules


def _rule(group: str, resources: Iterable[str], verbs: Iterable[str]) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}


def _labels() -> dict[str, str]:
    return {"app.kubernetes.io/name": NAME, "app.kubernetes.io/part-of": "headrace"}


def _metadata(settings: ManifestSettings) -> dict[str, Any]:
    return {"name": NAME, "namespace": settings.namespace, "labels": _labels()}


def _role(kind: str, metadata: Mapping[str, Any], rules: list[dict[str, Any]]) -> Document:
    return {"apiVersion": f"{_RBAC}/v1", "kind": kind, "metadata": metadata, "rules": rules}


def _binding(kind: str, metadata: Mapping[str, Any], settings: ManifestSettings) -> Document:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": f"{kind}Binding",
        "metadata": metadata,
        "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": NAME},
        "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": settings.namespace}],
    }


def _deployment(settings: ManifestSettings) -> Document:
    selector = {"app.kubernetes.io/name": NAME}
    container = {
        "name": "operator",
        "image": settings.image,
        "args": [*_COMMAND, "--namespace", settings.namespace, *settings.arguments],
        "ports": [{"name": "metrics", "containerPort": PORT, "protocol": "TCP"}],
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": PORT}, "initialDelaySeconds": 5, "periodSeconds": 20},
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    pod = {
        "serviceAccountName": NAME,
        "containers": [container],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(settings),
        "spec": {
            "replicas": settings.replicas,
            "selector": {"matchLabels": selector},
            "template": {"metadata": {"labels": _labels(), "annotations": _SCRAPED}, "spec": pod},
        },
    }
